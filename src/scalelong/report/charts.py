"""The data that the page's script draws: every chart as numbers, thinned, and the color and dashes of every run."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from scalelong.evaluation.evaluate import stored_metrics
from scalelong.evaluation.metrics import METRICS
from scalelong.experiments.comparison import RESOURCES, Comparison
from scalelong.experiments.statistics import change
from scalelong.report.read import RunView, labels
from scalelong.runs.logs import EMPTY, Floats, Series, StabilityArrays

STYLES = 8  # colors and dash patterns of the page
POINTS = 300  # of a curve
PANEL_POINTS = 90  # of a curve in a small panel
CS_RANGE = {"low": 0.5, "high": 0.95}  # Section 4.1's range of kappa, the shaded area of Fig. 7
BY_SKIP = {"x": "long skip i", "point": "long skip", "whole": True, "zero": True, "marks": True}
BY_NOISE = {"x": "σ_δ², variance of the extra noise", "point": "σ_δ²", "xlog": True, "marks": True}
BY_TIME = {"x": "time t of the process", "point": "t", "zero": True, "marks": True}
LOSS, CHANGE, RATIO = "mean squared error", "E‖F̂(x + δ) − F̂(x)‖² / m", "‖κᵢ·xᵢ‖ / ‖hᵢ‖"

Chart = dict[str, Any]


def styles(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """Color and dashes by label: the seeds of a variant look alike, and no two variants do."""
    rank = {label: k for k, label in enumerate(labels(views))}
    looks = {label: {"color": k % STYLES, "dash": (k + k // STYLES) % STYLES} for label, k in rank.items()}
    several = len({view.seed for view in views}) > 1
    return [{"label": view.label, "seed": view.seed if several else None, **looks[view.label]} for view in views]


def charts(views: Sequence[RunView], comparison: Comparison | None) -> dict[str, Chart]:
    """Every chart for which at least one run has data, by name."""
    drawn: dict[str, Chart | None] = {
        "forest": None if comparison is None else forest(views, comparison),
        "relative": None if comparison is None else relative(views, comparison),
        "validation_ema": curve(views, "val_loss_ema", LOSS),
        "validation": curve(views, "val_loss", LOSS),
        **{f"metric {name}": curve(views, name, label) for name, label in metrics(views).items()},
        "loss": curve(views, "loss", LOSS, smooth=True),
        "gradient": curve(views, "grad_norm", "norm", smooth=True),
        "norms": norms(views),
        "norm_by_skip": by_skip(views, "‖hᵢ‖", lambda log: _of_norms(log, "final")),
        "growth": by_skip(views, "p", lambda log: _of_norms(log, "growth")),
        "absolute_oscillation": by_skip(views, "RMS of ‖hᵢ‖ − smooth", lambda log: _of_norms(log, "band")),
        "oscillation": by_skip(views, "std of Δ log ‖hᵢ‖", lambda log: log.oscillation("probe", "backbone")),
        "oscillation_train": by_skip(views, "std of Δ log ‖hᵢ‖", lambda log: log.oscillation("train", "backbone")),
        "oscillation_gradient": by_skip(views, "std of Δ log of the norm", gradient_by_skip),
        "kappa": kappa(views),
        "ratio": by_skip(views, RATIO, lambda log: latest(log, "probe", "ratio")),
        "ratios": over_training(views, "probe", "ratio", y=RATIO),
        "robust_change": by_noise(views, "sensitivity", CHANGE, lambda row: [row["overall"]["change"]]),
        "robust_loss": by_noise(views, "sensitivity", LOSS, lambda row: [row["overall"]["loss"]]),
        "robust_distance": by_noise(
            views, "distances", "distance", lambda row: [row["value"], row["low"], row["high"]]
        ),
        "lipschitz": robustness(views, _lipschitz, {**BY_TIME, "y": "‖∂F̂/∂x‖₂"}),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


def metrics(views: Sequence[RunView]) -> dict[str, str]:
    """Names and labels of the metrics that training logged: those of METRICS and those in stored evaluations."""
    labels = {name: name.upper() for name in METRICS}
    for view in views:
        labels |= {metric.name: metric.label for metric in stored_metrics(view.run.evaluations.get("train"))}
    return {name: label for name, label in labels.items() if any(name in view.run.metrics for view in views)}


def lines(series: Sequence[dict[str, Any]], **axes: Any) -> Chart | None:
    return {"kind": "lines", "series": series, **axes} if series else None


# ------------------------------------------------------------------------------------------------- over training


def curve(views: Sequence[RunView], name: str, y: str, smooth: bool = False) -> Chart | None:
    """One metric over the steps."""
    series = [{"run": view.index, **points} for view in views if (points := thin(view.run.column(name)))]
    return lines(series, x="step", y=y, smooth=smooth)


def relative(views: Sequence[RunView], comparison: Comparison) -> Chart | None:
    """The validation loss against the baseline's at the same seed and step, in percent."""
    losses = [view.run.column(comparison.loss).finite() for view in views]
    baseline = {view.seed: losses[view.index] for view in views if view.label == comparison.baseline}
    series = []
    for view in views:
        own, base = losses[view.index], baseline.get(view.seed, EMPTY)
        steps, mine, theirs = np.intersect1d(own.steps, base.steps, return_indices=True)
        points = thin(Series(steps, 100 * (own.values[mine] / base.values[theirs] - 1)))
        if points and len(steps) > 1 and view.label != comparison.baseline:
            series.append({"run": view.index, **points})
    return lines(series, x="step", y="change, %", level=0)


def norms(views: Sequence[RunView]) -> Chart | None:
    """The paper's Fig. 1: the smoothed norm on training batches with a running band, one page per join or block."""
    logs = [(view, view.run.stability) for view in views if view.run.stability is not None]
    curves = {view.index: _layers(log) for view, log in logs}
    pages = []
    for title in dict.fromkeys(title for own in curves.values() for title in own):
        series = [{"run": index, **own[title]} for index, own in curves.items() if title in own]
        pages.append({"title": title, "panels": [{"title": "", "series": series}]})
    return {"kind": "lines", "x": "step", "y": "norm", "zero": True, "pages": pages} if pages else None


def _layers(log: StabilityArrays) -> dict[str, Chart]:
    """Name of a join or block → its smoothed norm over the steps with a running band of one absolute oscillation."""
    layers: dict[str, Chart] = {}
    sides = [f"‖h_{i}‖" for i in range(1, log.n + 1)]
    sides = [name + note for name, note in zip(sides, ["", *[""] * (log.n - 2), " (middle block)"], strict=False)]
    if sides:
        sides[0] += " (outermost)"
    for part, names in (("backbone", sides), ("blocks", [f"block {name}" for name in log.blocks])):
        found = log.norms("train", part, width=len(names)) if names else None
        if found is None:
            continue
        keep = np.unique(np.linspace(0, len(log.steps) - 1, PANEL_POINTS).round().astype(int))
        for k, name in enumerate(names):
            x, y, band = log.steps[keep], found.smooth[keep, k], found.running_band[keep, k]
            if np.isfinite(y).any():
                ends = {"low": rounded(np.maximum(y - band, 0)), "high": rounded(y + band)}
                layers[name] = {"x": rounded(x, 7), "y": rounded(y), **ends}
    return layers


def _of_norms(log: StabilityArrays, field: str) -> Floats | None:
    curves = log.norms("train", "backbone")
    return None if curves is None else getattr(curves, field)


def over_training(views: Sequence[RunView], *path: str, y: str) -> Chart | None:
    """A value of every long skip over the steps: one panel per skip."""
    panels = []
    for i in range(1, max((view.run.stability.n for view in views if view.run.stability), default=0) + 1):
        if series := _traces(views, path, i):
            panels.append({"title": f"i = {i}", "series": series})
    return {"kind": "lines", "x": "step", "y": y, "own": True, "panels": panels} if panels else None


def _traces(views: Sequence[RunView], path: Sequence[str], i: int) -> list[dict[str, Any]]:
    """The value of long skip i over the steps: one curve per run."""
    series = []
    for view in views:
        log = view.run.stability
        matrix = None if log is None else log.matrix(*path)
        if log is None or matrix is None or i > matrix.shape[1]:
            continue
        if points := thin(Series(log.steps, matrix[:, i - 1]), PANEL_POINTS):
            series.append({"run": view.index, **points})
    return series


def thin(series: Series, points: int = POINTS) -> dict[str, Any] | None:
    """Reduce a curve to at most `points` buckets of equally many entries: mean step, mean value, minimum and maximum.

    Spikes stay visible in the range. Values that are not finite are left out; a short curve stays as it is, without a
    range. Returns None for an empty curve.
    """
    finite = series.finite()
    n = len(finite)
    if n == 0:
        return None
    if n <= points:
        return {"x": rounded(finite.steps, 9), "y": rounded(finite.values)}
    starts = np.linspace(0, n, points + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, n))
    x = np.add.reduceat(finite.steps, starts) / counts
    x[0], x[-1] = finite.steps[0], finite.steps[-1]  # a curve starts and ends where the run does
    return {
        "x": rounded(x, 7),
        "y": rounded(np.add.reduceat(finite.values, starts) / counts),
        "low": rounded(np.minimum.reduceat(finite.values, starts)),
        "high": rounded(np.maximum.reduceat(finite.values, starts)),
    }


def rounded(values: Any, digits: int = 5) -> list[float | int | None]:
    """Numbers for JSON with `digits` significant digits, more than a screen shows; None for what is not finite."""
    numbers: list[float | int | None] = []
    for value in np.asarray(values, dtype=np.float64).tolist():
        short = float(f"{value:.{digits}g}") if math.isfinite(value) else None
        numbers.append(int(short) if short is not None and short.is_integer() and abs(short) < 1e15 else short)
    return numbers


# ------------------------------------------------------------------------------------------------- over long skips


def by_skip(views: Sequence[RunView], y: str, read: Callable[[StabilityArrays], Floats | None]) -> Chart | None:
    """One value per long skip: one line per run."""
    series = []
    for view in views:
        values = None if view.run.stability is None else read(view.run.stability)
        if values is not None and np.isfinite(values).any():
            series.append({"run": view.index, "x": list(range(1, len(values) + 1)), "y": rounded(values)})
    return lines(series, **BY_SKIP, y=y)


def kappa(views: Sequence[RunView]) -> Chart | None:
    """κ_i, of learned ones with the range over tokens or channels, and the range of CS behind them (Fig. 7)."""
    chart = by_skip(views, "κᵢ", lambda log: latest(log, "kappa", "mean"))
    if chart is None:
        return None
    for line in chart["series"]:
        log = views[line["run"]].run.stability
        low, high = (None if log is None else latest(log, "kappa", end) for end in ("min", "max"))
        if low is not None and high is not None and not np.array_equal(low, high):
            line |= {"low": rounded(low), "high": rounded(high), "whiskers": True}
    x = max((line["x"] for line in chart["series"]), key=len)
    chart["band"] = {"x": x, **{end: rounded([base ** (i - 1) for i in x]) for end, base in CS_RANGE.items()}}
    return chart


def gradient_by_skip(log: StabilityArrays) -> Floats | None:
    """The gradient's relative oscillation in the block that consumes each long skip."""
    spreads = log.oscillation("grad", "blocks", width=len(log.blocks))
    if spreads is None or not log.n:
        return None
    values = np.full(log.n, np.nan)
    for k, skip in enumerate(log.header["skips"]):
        to = str(skip.get("to", "")) if isinstance(skip, dict) else ""
        own = (spread for block, spread in zip(log.blocks, spreads, strict=True) if f"{to}.".startswith(f"{block}."))
        values[k] = next(own, np.nan)
    return values


def latest(log: StabilityArrays, *path: str, over: int = 5) -> Floats | None:
    """The median of the last snapshots, which one outlier does not change."""
    matrix = log.matrix(*path)
    if matrix is None:
        return None
    rows = matrix[np.isfinite(matrix).any(1)][-over:]
    return np.nanmedian(rows, axis=0) if np.isfinite(rows).any(0).all() else None


# -------------------------------------------------------------------------------------------------------- others


def forest(views: Sequence[RunView], comparison: Comparison) -> Chart | None:
    """Paired ratios of every variant to the baseline: one panel per measure, the clearest difference first."""
    style = {look["label"]: {"color": look["color"], "dash": look["dash"]} for look in styles(views)}
    index = {(view.label, -1 if view.seed is None else view.seed): view.index for view in views}
    panels = []
    for key, title, *_ in comparison.measures():
        values = {(run.variant, run.seed): run.values[key] for run in comparison.runs if key in run.values}
        rows = []
        for row in comparison.rows:
            if key in RESOURCES or key not in row.ratios:
                continue
            points = [
                {"run": index[variant, seed], "value": rounded([value / base])[0]}
                for (variant, seed), value in values.items()
                if variant == row.variant and (base := values.get((comparison.baseline, seed), 0)) > 0
            ]
            ratio = row.ratios[key]
            mean, low, high = rounded([math.nan if v is None else v for v in (ratio.mean, ratio.low, ratio.high)])
            rows.append(
                {"label": row.variant, **style[row.variant], "mean": mean, "low": low, "high": high, "points": points,
                 "text": change(ratio)}
            )  # fmt: skip
        if rows:
            ratios = [row.ratios[key] for row in comparison.rows if key in row.ratios]
            size = max(abs(math.log(ratio.mean)) for ratio in ratios)
            panels.append(((not any(r.excludes_one for r in ratios), -size), {"title": title, "rows": rows}))
    panels.sort(key=lambda panel: panel[0])
    return {"kind": "forest", "panels": [panel for _, panel in panels]} if panels else None


def robustness(views: Sequence[RunView], read: Callable[[Any], list[list[Any]]], axes: Chart) -> Chart | None:
    """RUN/robustness.json, one line per run. `read` returns rows of x, y and, for an interval, low and high."""
    series = []
    for view in views:
        try:
            rows = sorted(read(view.run.robustness), key=lambda row: row[0])
            columns = [rounded(column) for column in zip(*rows, strict=True)]
        except (KeyError, TypeError, ValueError, OverflowError):  # absent or damaged
            continue
        if not columns:
            continue
        line: dict[str, Any] = {"run": view.index, "x": columns[0], "y": columns[1]}
        if len(columns) == 4 and None not in columns[2] + columns[3]:
            line |= {"low": columns[2], "high": columns[3], "whiskers": True}
        series.append(line)
    return lines(series, **axes)


def by_noise(views: Sequence[RunView], name: str, y: str, read: Callable[[Any], list[Any]]) -> Chart | None:
    def rows(facts: Any) -> list[list[Any]]:
        return [[row["variance"], *read(row)] for row in facts[name] if row["variance"] > 0]

    return robustness(views, rows, {**BY_NOISE, "y": y})


def _lipschitz(facts: Any) -> list[list[Any]]:
    bins = zip(pairwise(facts["edges"]), facts["lipschitz"], strict=bool(facts["lipschitz"]))
    return [[(low + high) / 2, row["network"]] for (low, high), row in bins]
