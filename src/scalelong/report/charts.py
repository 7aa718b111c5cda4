"""What the page's script draws: every chart as numbers, thinned, and the look of every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scalelong.experiments.comparison import Comparison
from scalelong.experiments.table import change
from scalelong.report.read import RunView, labels
from scalelong.report.thin import number, numbers, thin
from scalelong.runs.logs import Floats, Series
from scalelong.runs.watch_log import WatchLog

COLOURS = 8
PANEL_POINTS = 90
CS_RANGE = (0.5, 0.95)  # Section 4.1's range of kappa, the shaded area of Fig. 7
FOREST = (
    "val_loss",
    "val_loss_ema",
    "frechet",
    "on_the_way",
    "feature_oscillation",
    "middle_oscillation",
    "gradient_oscillation",
)

Chart = dict[str, Any]


def looks(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Colour and dashes by label, so that the seeds of a variant look alike and no two variants do."""
    groups = labels(runs)
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
        "relative": None if comparison is None else relative(runs, comparison),
        "fid": curve(runs, "fid"),
        "frechet": curve(runs, "frechet"),
        "gradient": curve(runs, "grad_norm", smooth=True),
        "norms": by_variant(runs, ("probe", "backbone")),
        "oscillation": by_skip(runs, lambda log: log.oscillation("probe", "backbone")),
        "oscillation_train": by_skip(runs, lambda log: log.oscillation("train", "backbone")),
        "oscillation_gradient": by_skip(runs, gradient_by_skip),
        "kappa": kappa(runs),
        "ratio": by_skip(runs, lambda log: latest(log, "probe", "ratio")),
        "ratios": over_training(runs, ("probe", "ratio")),
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


def relative(runs: Sequence[RunView], comparison: Comparison) -> Chart | None:
    """The validation loss against the baseline's of the same seed and step, in per cent."""
    base = {run.seed: run.column(comparison.loss).finite() for run in runs if run.label == comparison.baseline}
    series = []
    for run in runs:
        if run.label == comparison.baseline or run.seed not in base:
            continue
        own = run.column(comparison.loss).finite()
        steps, mine, theirs = np.intersect1d(own.steps, base[run.seed].steps, return_indices=True)
        points = thin(Series(steps, 100 * (own.values[mine] / base[run.seed].values[theirs] - 1)))
        if points is not None and len(steps) > 1:
            series.append({"run": run.index, **points})
    return {"kind": "lines", "x": "step", "level": 0, "series": series} if series else None


def over_training(runs: Sequence[RunView], path: tuple[str, str]) -> Chart | None:
    """The figure of every long skip over the steps: a panel a skip."""
    panels = [
        {"title": f"i = {i}", "series": series}
        for i in range(1, _most_skips(runs) + 1)
        if (series := _traces(runs, path, i))
    ]
    return {"kind": "lines", "x": "step", "own": True, "panels": panels} if panels else None


def by_variant(runs: Sequence[RunView], path: tuple[str, str]) -> Chart | None:
    """The same, a panel a variant on one scale, a page a long skip: curves that would hide each other stand apart."""
    if len(labels(runs)) == 1:
        return over_training(runs, path)
    pages = []
    for i in range(1, _most_skips(runs) + 1):
        of_label = {label: _traces([run for run in runs if run.label == label], path, i) for label in labels(runs)}
        panels = [{"title": label, "series": series} for label, series in of_label.items() if series]
        if panels:
            pages.append({"title": f"i = {i}", "panels": panels})
    return {"kind": "lines", "x": "step", "pages": pages} if pages else None


def _traces(runs: Sequence[RunView], path: tuple[str, str], i: int) -> list[dict[str, Any]]:
    """The figure of long skip i over the steps, a curve a run."""
    series = []
    for run in runs:
        matrix = None if run.watch is None else run.watch.matrix(*path)
        if run.watch is None or matrix is None or i > matrix.shape[1]:
            continue
        points = thin(Series(run.watch.steps, matrix[:, i - 1]), PANEL_POINTS)
        if points is not None:
            series.append({"run": run.index, **points})
    return series


def _most_skips(runs: Sequence[RunView]) -> int:
    return max((run.watch.n for run in runs if run.watch is not None), default=0)


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


def _skips_chart(series: list[dict[str, Any]]) -> Chart | None:
    if not series:
        return None
    return {"kind": "lines", "x": "long skip i", "point": "long skip", "whole": True, "zero": True, "marks": True,
            "series": series}  # fmt: skip


def _band_ends() -> tuple[tuple[str, float], tuple[str, float]]:
    return ("low", CS_RANGE[0]), ("high", CS_RANGE[1])
