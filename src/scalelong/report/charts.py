"""What the page's script draws: every chart as numbers, thinned, and the look of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalelong.experiments.comparison import Comparison
from scalelong.experiments.logs import Floats, Series
from scalelong.experiments.table import change
from scalelong.experiments.watch_log import WatchLog
from scalelong.report.read import RunView
from scalelong.report.thin import number, numbers, thin

COLOURS = 8
PANEL_POINTS = 90
CS_RANGE = (0.5, 0.95)  # Section 4.1's range of kappa, the shaded area of Fig. 7
FOREST = ("val_loss", "frechet", "feature_oscillation", "middle_oscillation", "gradient_oscillation", "seconds")

Chart = dict[str, Any]


def looks(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Colour and dashes by label, so that the seeds of a variant look alike and no two variants do."""
    groups = list(dict.fromkeys(run.label for run in runs))
    several = len({run.seed for run in runs}) > 1
    return [
        {
            "label": run.label,
            "seed": run.seed if several else None,
            "color": groups.index(run.label) % COLOURS,
            "dash": (groups.index(run.label) + groups.index(run.label) // COLOURS) % COLOURS,
        }
        for run in runs
    ]


def charts(runs: Sequence[RunView], comparison: Comparison | None) -> dict[str, Chart]:
    """Every chart that at least one run has figures for, by name."""
    found: dict[str, Chart | None] = {
        "forest": None if comparison is None else forest(runs, comparison, looks(runs)),
        "loss": curve(runs, "loss", smooth=True),
        "validation": curve(runs, "val_loss"),
        "validation_ema": curve(runs, "val_loss_ema"),
        "gradient": curve(runs, "grad_norm", smooth=True),
        "norms": over_training(runs, ("probe", "backbone"), "h"),
        "oscillation": by_skip(runs, lambda log: log.oscillation("probe", "backbone")),
        "oscillation_train": by_skip(runs, lambda log: log.oscillation("train", "backbone")),
        "oscillation_gradient": by_skip(runs, gradient_by_skip),
        "kappa": kappa(runs),
        "ratio": by_skip(runs, lambda log: latest(log, "probe", "ratio")),
        "ratios": over_training(runs, ("probe", "ratio"), "skip"),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def curve(runs: Sequence[RunView], name: str, smooth: bool = False) -> Chart | None:
    """One quantity over the steps."""
    series = []
    for run in runs:
        points = thin(run.column(name))
        if points is not None:
            series.append({"run": run.index, **points})
    return {"kind": "lines", "x": "step", "smooth": smooth, "series": series} if series else None


def over_training(runs: Sequence[RunView], path: tuple[str, str], name: str) -> Chart | None:
    """A panel a long skip: its figure over the steps."""
    matrices = {run.index: run.watch.matrix(*path) for run in runs if run.watch is not None}
    width = max((matrix.shape[1] for matrix in matrices.values() if matrix is not None), default=0)
    panels = []
    for k in range(width):
        series = []
        for run in runs:
            matrix = matrices.get(run.index)
            if run.watch is None or matrix is None or k >= matrix.shape[1]:
                continue
            points = thin(Series(run.watch.steps, matrix[:, k]), PANEL_POINTS)
            if points is not None:
                series.append({"run": run.index, **points})
        panels.append({"title": f"{name} {k + 1}" if name == "skip" else f"h{subscript(k + 1)}", "series": series})
    return {"kind": "lines", "x": "step", "own": True, "panels": panels} if panels else None


def by_skip(runs: Sequence[RunView], read: Any) -> Chart | None:
    """A figure over the index of the long skips, a line a run."""
    series = []
    for run in runs:
        values: Floats | None = None if run.watch is None else read(run.watch)
        if values is not None and np.isfinite(values).any():
            series.append({"run": run.index, "x": list(range(1, len(values) + 1)), "y": numbers(values)})
    return _skips_chart(series)


def kappa(runs: Sequence[RunView]) -> Chart | None:
    """κ_i, learned ones with the range over tokens or channels, and CS's range behind them (Fig. 7)."""
    series, most = [], 0
    for run in runs:
        if run.watch is None:
            continue
        mean, low, high = (latest(run.watch, "kappa", part) for part in ("mean", "min", "max"))
        if mean is None:
            continue
        most = max(most, len(mean))
        line: dict[str, Any] = {"run": run.index, "x": list(range(1, len(mean) + 1)), "y": numbers(mean)}
        if low is not None and high is not None and not np.array_equal(low, high):
            line |= {"low": numbers(low), "high": numbers(high), "whiskers": True}
        series.append(line)
    chart = _skips_chart(series)
    if chart is not None:
        x = list(range(1, most + 1))
        chart["band"] = {"x": x, **{end: numbers([base ** (i - 1) for i in x]) for end, base in _band_ends()}}
    return chart


def gradient_by_skip(log: WatchLog) -> Floats | None:
    """The gradient's oscillation in the block that consumes each long skip."""
    spreads = log.oscillation("grad", "blocks", width=len(log.blocks))
    if spreads is None or not log.n:
        return None
    values = np.full(log.n, np.nan)
    for k, skip in enumerate(log.header["skips"]):
        to = str(skip.get("to", "")) if isinstance(skip, dict) else ""
        place = next((j for j, block in enumerate(log.blocks) if to == block or to.startswith(f"{block}.")), None)
        if place is not None:
            values[k] = spreads[place]
    return values


def latest(log: WatchLog, *path: str, over: int = 5) -> Floats | None:
    """The median of the last looks, so that one look's accident does not stand for the end."""
    matrix = log.matrix(*path)
    if matrix is None:
        return None
    rows = matrix[np.isfinite(matrix).any(1)][-over:]
    return np.nanmedian(rows, axis=0) if np.isfinite(rows).any(0).all() else None


def forest(runs: Sequence[RunView], comparison: Comparison, styles: list[dict[str, Any]]) -> Chart | None:
    """Every variant against the baseline: the paired ratios, a panel a measure."""
    place = {(run.label, -1 if run.seed is None else run.seed): run.index for run in runs}
    values = {(m.variant, m.seed): m.values for m in comparison.runs}
    panels = []
    for measure in (m for m in comparison.measures() if m.key in FOREST):
        rows = []
        for row in comparison.rows:
            ratio = row.ratios.get(measure.key)
            if ratio is None:
                continue
            points = []
            for (variant, seed), own in values.items():
                base = values.get((comparison.baseline, seed), {})
                if variant == row.variant and measure.key in own and base.get(measure.key, 0) > 0:
                    points.append({"run": place[variant, seed], "value": number(own[measure.key] / base[measure.key])})
            style = styles[points[0]["run"]]  # type: ignore[index]
            ends = [None if end is None else number(end) for end in (ratio.low, ratio.high)]
            rows.append(
                {"label": row.variant, "color": style["color"], "dash": style["dash"], "mean": number(ratio.mean),
                 "low": ends[0], "high": ends[1], "points": points, "text": change(ratio)}
            )  # fmt: skip
        if rows:
            panels.append({"title": measure.title, "rows": rows})
    return {"kind": "forest", "panels": panels} if panels else None


def subscript(value: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in str(value))


def _skips_chart(series: list[dict[str, Any]]) -> Chart | None:
    if not series:
        return None
    return {"kind": "lines", "x": "long skip i", "point": "long skip", "whole": True, "zero": True, "marks": True,
            "series": series}  # fmt: skip


def _band_ends() -> tuple[tuple[str, float], tuple[str, float]]:
    return ("low", CS_RANGE[0]), ("high", CS_RANGE[1])
