"""Matplotlib figures of the commands on stability, and the one function that saves a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from scalelong.errors import require
from scalelong.files import FIGURES, atomic_file, check_target
from scalelong.report.findings import spell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scalelong.experiments.coords import Coordinates
    from scalelong.experiments.frontier_study import Row
    from scalelong.experiments.halving import Tuned
    from scalelong.experiments.robustness import Robustness
    from scalelong.experiments.transfer import Curve
    from scalelong.kappa import Histogram, KappaEstimate
    from scalelong.representation import LinearProbe
    from scalelong.theory.report import TheoryReport

GREEN, RED, YELLOW, ORANGE, BLUE = "#2e7d5b", "#bf616a", "#ebcb8b", "#d08770", "#5e81ac"
SCALINGS = ("#4c566a", ORANGE, GREEN, "#8e5ea2")
MARKERS = {"kaiming": "o", "norm-preserving": "s"}
INIT_COLORS = {"kaiming": RED, "norm-preserving": BLUE}


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure of this size in inches. Matplotlib is imported here, not with the module."""
    matplotlib = require("matplotlib.figure", "train", "figures")
    return cast("Figure", matplotlib.Figure(figsize=(width, height), layout="constrained"))


def save_figure(figure: Figure, path: Path | str, dpi: int = 130) -> None:
    """Write `figure` atomically in the format of the suffix (.png, .svg or .pdf)."""
    check_target(path, suffixes=FIGURES)
    kind = Path(path).suffix.lower().removeprefix(".")
    with atomic_file(path) as temporary:
        # Without the version of matplotlib a PNG depends on the data alone.
        figure.savefig(temporary, dpi=dpi, format=kind, metadata={"Software": None} if kind == "png" else None)


def draw_kappa(estimate: KappaEstimate, name: str) -> Figure:
    """Fig. 3a and 3b for a dataset, and the range of kappa that follows from them."""
    from scalelong.kappa import UPPER

    figure = new_figure(15, 4.2)
    pixels, inputs, ratios, sums = figure.subplots(1, 4)
    _histogram(pixels, estimate.pixel_histogram)
    pixels.axhline(1 / 2, color="k", lw=1, label="uniform on [−1, 1]")
    pixels.set(title=f"{name}: x_0", xlabel="pixel", ylabel="density")

    _histogram(inputs, estimate.input_histogram)
    inputs.axvline(estimate.mean_input_norm, color=GREEN, label=f"mean {estimate.mean_input_norm:.3f}")
    lemma = f"Lemma 3.2: {estimate.lemma_input_norm:.3f}"
    inputs.axvline(estimate.lemma_input_norm, color="k", lw=1, ls="--", label=lemma)
    inputs.set(title=f"‖x_t‖²/m, {estimate.process}", xlabel="‖x_t‖²/m")

    _histogram(ratios, estimate.histogram)
    ratios.axvline(estimate.mean_ratio, color=GREEN, label=f"mean {estimate.mean_ratio:.2f}")
    ratios.axvline(UPPER, color=RED, label=f"5: {estimate.share_below_5:.1%} lie below")
    ratios.set(title="‖ε‖²/‖x_t‖²", xlabel="ratio", yscale="log")
    for ax in (pixels, inputs, ratios):
        ax.legend(fontsize=8)

    kappas = [k / 200 for k in range(1, 201)]
    sums.plot(kappas, [estimate.sum_at(kappa) for kappa in kappas], color="k")
    sums.axhline(estimate.mean_ratio, color=GREEN, lw=1, label=f"mean ratio {estimate.mean_ratio:.2f}")
    sums.axhline(estimate.cap, color=RED, lw=1, label=f"min(5, N) = {estimate.cap:g}")
    low, high, best, n = estimate.low, estimate.high, estimate.recommended, estimate.num_skips
    sums.axvspan(low, high, color=YELLOW, alpha=0.4, label=f"{low:.2f} to {high:.2f}")
    sums.plot([best], [estimate.sum_at(best)], "o", color=ORANGE, label=f"recommended {best:.2f}")
    sums.set(title=f"Σκ² with N = {n} long skips", xlabel="kappa", ylim=(0, n + 0.3))
    sums.legend(fontsize=8, loc="upper left")
    return figure


def _histogram(ax: Axes, histogram: Histogram) -> None:
    """Draw densities: they integrate to the share of all values that lies inside the edges."""
    total = sum(histogram.counts) + histogram.below + histogram.above
    width = histogram.edges[1] - histogram.edges[0]
    heights = [count / total / width for count in histogram.counts]
    ax.bar(histogram.edges[:-1], heights, width, align="edge", color="#88a0c4")


def draw_theory(report: TheoryReport) -> Figure:
    """Six panels about Section 3: lines are predictions, markers are measurements."""
    figure, shape = new_figure(15, 9), report.shape
    fit, kaiming_fit, sums, concentration, constant, bounds = figure.subplots(2, 3).flat
    _feature_fit(fit, report, "norm-preserving")
    _feature_fit(kaiming_fit, report, "kaiming")
    _path_sums(sums, report)
    _sweeps(concentration, constant, report)
    _robustness_bounds(bounds, report)
    size = f"m = {shape.width}, N = {shape.skips}, l = {shape.depth}"
    figure.suptitle(f"Section 3 on the network of Eq. 3: {size}, {report.seeds} networks")
    return figure


def _feature_fit(ax: Axes, report: TheoryReport, init: str) -> None:
    """Theorem 3.1: E‖h_i‖² against Σ_{j>i} κ_j², with the fitted line."""
    fit = report.fit(init)
    for name, color in zip(report.scalings, SCALINGS, strict=True):
        points = [point for point in fit.points if point.scaling == name]
        ax.plot([p.total for p in points], [p.measured for p in points], MARKERS[init], color=color, label=name)
    ends = [0.0, max(point.total for point in fit.points)]
    ax.plot(ends, [fit.c1 * x + fit.c2 for x in ends], "k-", lw=1, label=f"fit, R² = {fit.r_squared:.3f}")
    ax.set(title=f"Theorem 3.1, {init}", xlabel="Σ κ_j² over j > i", ylabel="E‖h_i‖² / ‖x_t‖²")
    ax.set_ylim(top=1.25 * max(point.measured for point in fit.points))  # room for the legend
    ax.legend(fontsize=8, ncols=2, loc="upper left")


def _path_sums(ax: Axes, report: TheoryReport) -> None:
    """The path sums with their true gains against every measured E‖h_i‖²."""
    ends: list[float] = []
    for init, marker in MARKERS.items():
        for name, color in zip(report.scalings, SCALINGS, strict=True):
            points = [point for point in report.fit(init).points if point.scaling == name]
            x = [point.predicted for point in points]
            label = init if name == "standard" else None
            ax.loglog(x, [point.measured for point in points], marker, color=color, label=label)
            ends += x
    ax.loglog([min(ends), max(ends)], [min(ends), max(ends)], "k-", lw=1, label="measured = predicted")
    ax.set(title="Path sums with their true gains", xlabel="predicted E‖h_i‖² / ‖x_t‖²", ylabel="measured")
    ax.legend(fontsize=8)


def _sweeps(spreads: Axes, constants: Axes, report: TheoryReport) -> None:
    """Theorem 3.1's probability: the spread over networks against the width. Theorem 3.3: its constant against N."""
    for init, color in INIT_COLORS.items():
        rows, by_skips = report.sweep(init, "width"), report.sweep(init, "skips")
        widths, skips = [row.shape.width for row in rows], [row.shape.skips for row in by_skips]
        label = f"{init}: m^({report.spread_exponents[init]:.2f})"
        spreads.loglog(widths, [row.spread for row in rows], MARKERS[init], color=color, label=label)
        constants.semilogy(skips, [row.constant for row in by_skips], MARKERS[init] + "-", color=color, label=init)
    spreads.loglog(widths, [row.spread_predicted for row in rows], "k-", lw=1, label="√((2N+1)(5l−3)/m)")
    spreads.set_xticks(widths, [str(width) for width in widths])
    spreads.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    spreads.set_ylim(0.6 * min(row.spread for row in rows), None)
    spreads.minorticks_off()
    spreads.set(title="Theorem 3.1: concentration", xlabel="width m", ylabel="std of log ‖h_0‖² over networks")
    constants.set_xticks(skips)
    y = "max ‖∇_W ℓ‖² / (ℓ‖x_t‖²(Σκ_j² + 1))"
    constants.set(title="Theorem 3.3: the constant it needs", xlabel="long skips N", ylabel=y)
    spreads.legend(fontsize=8)
    constants.legend(fontsize=8)


def _robustness_bounds(ax: Axes, report: TheoryReport) -> None:
    """Theorem 3.4, norm-preserving: measurements beside the bounds."""
    rows = [row for row in report.robustness if row.init == "norm-preserving"]
    bars = [("perturbed", "random δ", "#a3be8c"), ("network", "‖∂UNet/∂x_t‖", GREEN),
            ("main_term", "main term Σκ_i M₀^i", YELLOW), ("paper", "paper's bound", ORANGE),
            ("certified", "certified bound", RED)]  # fmt: skip
    for k, (field, label, color) in enumerate(bars):
        values = [getattr(row, field) for row in rows]
        ax.bar([x + 0.16 * (k - 2) for x in range(len(rows))], values, 0.16, color=color, label=label)
    ax.set_yscale("log")
    ax.set_ylim(top=max(row.certified for row in rows) * 1e4)
    ax.set_xticks(range(len(rows)), [row.scaling for row in rows], fontsize=8)
    ax.set(title="Theorem 3.4, norm-preserving", ylabel="‖ΔUNet‖ / ‖δ‖")
    ax.legend(fontsize=8, ncols=2)


def draw_frontier(rows: Sequence[Row]) -> Figure:
    """The frontier against N, or against width or steps if only these differ; one panel per other setting.

    Dashed: the predicted ratio to the unscaled run.
    """
    from scalelong.experiments.frontier_study import FACTORS, several, size_text

    panels: dict[tuple[str, str], list[Row]] = {}  # (title, factor on the x axis) → rows
    for row in rows:
        setting = row.cell.network, row.cell.optimizer
        factor, *_ = several([r.cell for r in rows if (r.cell.network, r.cell.optimizer) == setting]) or ["skips"]
        sizes = size_text(row.cell, [name for name in FACTORS if name != factor])
        panels.setdefault((", ".join([*setting, *sizes]), factor), []).append(row)
    figure = new_figure(5.2 * len(panels), 4.2)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True).flat
    for ax, ((title, factor), own) in zip(axes, panels.items(), strict=True):
        size = attrgetter(f"cell.{factor}")
        base = {size(row): row.frontier.lr for row in own if row.cell.scaling.is_identity}
        for label, color in zip(dict.fromkeys(row.cell.scaling.label for row in own), cycle(colors()), strict=False):
            line = sorted((row for row in own if row.cell.scaling.label == label), key=size)
            xs, ys = [size(row) for row in line], [row.frontier.lr for row in line]
            ax.loglog(xs, ys, "o-", color=color, label=spell(label))
            dots = [(size(row), low) for row in line for low, _ in row.frontier.brackets.values()]
            ax.plot(*zip(*dots, strict=True), ".", ms=4, alpha=0.5, color=color)
            predicted = [(x, base[x] * row.predicted) for x, row in zip(xs, line, strict=True) if row.predicted]
            if predicted and not line[0].cell.scaling.is_identity:
                ax.plot(*zip(*predicted, strict=True), "x--", color=color, lw=1)
        _ticks(ax, sorted({size(row) for row in own}))
        name = "long skips N" if factor == "skips" else factor
        ax.set_title(title, fontsize=10)
        ax.set(xlabel=name)
        ax.legend(fontsize=8)
    figure.axes[0].set_ylabel("largest learning rate that does not diverge")
    rates = [low for row in rows for low, _ in row.frontier.brackets.values()]
    if max(rates) < 2 * min(rates):  # a log axis of almost no range has no ticks
        figure.axes[0].set_ylim(min(rates) / 2, 2 * max(rates))
    theory = any(row.predicted is not None for row in rows)
    dashed = "; dashed: predicted from gradients at initialization" if theory else ""
    figure.supxlabel(f"small dots: seeds{dashed}", fontsize=8)
    return figure


def draw_sensitivity(rows: Sequence[dict[str, Any]]) -> Figure:
    """Final loss against learning rate, one panel per network, optimizer and size."""
    names = ("network", "optimizer", "skips", "width", "steps")
    settings = list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
    figure = new_figure(5.2 * len(settings), 4.2)
    for ax, setting in zip(figure.subplots(1, len(settings), squeeze=False).flat, settings, strict=True):
        own = [row for row in rows if tuple(row[name] for name in names) == setting]
        for row, color in zip(own, cycle(colors()), strict=False):
            ax.semilogx(row["lr"], row["loss"], "o-", ms=3, color=color, label=spell(row["label"]))
        title = f"{setting[0]}, {setting[1]}, N = {setting[2]}, width {setting[3]}, {setting[4]} steps"
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="learning rate", ylabel="final loss")
        ax.legend(fontsize=8)
    figure.supxlabel("a diverged run counts as untrained", fontsize=8)
    return figure


def draw_coordinates(rows: Sequence[Coordinates]) -> Figure:
    """Change of each kind of layer against width, one panel per parametrization."""
    words = list(dict.fromkeys(row.parametrization for row in rows))
    figure = new_figure(5.2 * len(words), 4.6)
    for ax, word in zip(figure.subplots(1, len(words), squeeze=False, sharey=True).flat, words, strict=True):
        own = [row for row in rows if row.parametrization == word]
        for k, row in enumerate(own):
            color = colors()[k % len(colors())]
            ax.loglog(list(row.curve), list(row.curve.values()), "o-", ms=3, lw=1, color=color, label=row.layer)
        _ticks(ax, sorted({width for row in own for width in row.curve}))
        ax.set(title=word, xlabel="width", ylabel="RMS change of the output")
    figure.axes[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Coordinate check: horizontal lines mean that a learning rate transfers over widths")
    return figure


def draw_transfer(curves: Sequence[Curve]) -> Figure:
    """Loss against learning rate, one panel per parametrization and scaling, one line per width and depth."""
    panels = list(dict.fromkeys((c.cell.parametrization, c.cell.scaling.label) for c in curves))
    figure = new_figure(5.2 * len(panels), 4.2)
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True).flat, panels, strict=True):
        own = [c for c in curves if (c.cell.parametrization, c.cell.scaling.label) == panel]
        for curve, color in zip(own, cycle(colors()), strict=False):
            points = [(lr, values) for lr, values in curve.losses.items() if None not in values]
            means = [(lr, math.fsum(v for v in values if v is not None) / len(values)) for lr, values in points]
            if means:
                ax.loglog(*zip(*means, strict=True), "o-", ms=3, color=color, label=curve.cell.label)
            ax.axvline(curve.optimum.mean, color=color, lw=1, ls=":")
        ax.set(title=", ".join(panel), xlabel="learning rate", ylabel="validation loss")
        ax.legend(fontsize=8)
    figure.suptitle("Learning-rate transfer (dotted: the optimum; a diverged run is not drawn)")
    return figure


def draw_rungs(tuned: Tuned, title: str, xlabel: str, ylabel: str) -> Figure:
    """Loss of every candidate at every rung (mean over blocks), and the final differences with their intervals."""
    figure = new_figure(11, 4.2)
    curves, gaps = figure.subplots(1, 2)
    names = [s.name for s in tuned.standings]
    for name, color in zip(names, cycle(colors())):
        points = [(r.steps, math.fsum(r.losses[name]) / len(r.losses[name])) for r in tuned.rungs if name in r.losses]
        if points:
            style, width = "o--" if tuned[name].dropped else "o-", 2.5 if name == tuned.best else 1
            curves.plot(*zip(*points, strict=True), style, ms=3, lw=width, color=color, label=name)
    curves.set(title=title, xlabel=xlabel, ylabel=ylabel)
    curves.legend(fontsize=7)
    others = [(name, gap) for name in reversed(names) if (gap := tuned.gap(name)) is not None]
    for k, (_, gap) in enumerate(others):
        if gap.loss.low is not None and gap.loss.high is not None:
            gaps.plot([gap.loss.low, gap.loss.high], [k, k], color=BLUE)
        gaps.plot([gap.loss.mean], [k], "o", color=BLUE)
    gaps.axvline(0, color="k", lw=1)
    gaps.set_yticks(range(len(others)), [f"{name}, {gap.steps:,}" for name, gap in others], fontsize=8)
    gaps.set(title=f"minus {tuned.best} (best)", xlabel="difference, paired")
    gaps.locator_params(axis="x", nbins=5)
    return figure


def colors() -> tuple[str, ...]:
    """One colour per line of a figure."""
    return (*SCALINGS, BLUE, RED, YELLOW, "#8fbcbb")


def _ticks(ax: Axes, values: Sequence[int]) -> None:
    ax.set_xticks(values, [str(value) for value in values])
    ax.set_xticks([], minor=True)


def draw_robustness(result: Robustness) -> Figure:
    """Fig. 3c for a run: change of the prediction and of the loss, distance, Lipschitz constants."""
    bins, distances = list(pairwise(result.edges)), result.distances
    panels = 4 if distances else 3
    figure = new_figure(4.2 * panels, 4)
    change, loss, *optional, lipschitz = figure.subplots(1, panels)
    for ax, quantity in ((change, "change"), (loss, "loss")):  # one line per timestep bin, and one over all
        rows = [row for row in result.sensitivity if row.variance or quantity == "loss"]
        xs = [row.variance for row in rows]
        for b, (low, high) in enumerate(bins):
            values = [math.nan if (row_bin := row.by_time[b]) is None else getattr(row_bin, quantity) for row in rows]
            ax.plot(xs, values, "o-", ms=3, lw=1, label=f"t from {low:g} to {high:g}")
        ax.plot(xs, [getattr(row.overall, quantity) for row in rows], "ko-", ms=3, label="all")
        _variance_axis(ax, xs)
        ax.legend(fontsize=7)
    target, output, x, _ = result.words
    change.set(title="change of the prediction", ylabel=f"E‖Δ{output}‖²/m", yscale="log")
    loss.set(title="loss with extra noise", ylabel=f"E‖{target} − {output}({x} + δ)‖²/m")
    for ax in optional:
        ax.plot([d.variance for d in distances], [d.value for d in distances], "ko-", ms=3)
        for d in distances:
            if d.low is not None and d.high is not None:
                ax.plot([d.variance, d.variance], [d.low, d.high], "k-", lw=1)
        ax.set(title=f"{result.metric}, {result.samples} samples", ylabel="distance to the data")
        _variance_axis(ax, [d.variance for d in distances])
    middles = [(low + high) / 2 for low, high in bins]
    pairs = list(zip(middles, result.lipschitz, strict=False))  # no constants were measured with points=0
    bounds = [(t, 10**one.log10_bound) for t, one in pairs if one.log10_bound is not None and one.log10_bound < 300]
    measured = f"‖∂{output}/∂{x}‖, measured"
    lipschitz.plot([t for t, _ in pairs], [one.network for _, one in pairs], "ko-", ms=3, label=measured)
    lipschitz.plot([t for t, _ in bounds], [b for _, b in bounds], "s--", ms=3, color=RED, label="Theorem 3.4's bound")
    lipschitz.set(title="local Lipschitz constant", xlabel="t", yscale="log")
    lipschitz.legend(fontsize=7)
    figure.suptitle(f"{result.run}: {result.scaling.get('kind', '')}, step {result.step}")
    return figure


def _variance_axis(ax: Axes, variances: Sequence[float]) -> None:
    ax.set(xlabel="σ_δ², variance of the extra noise")
    if positive := [variance for variance in variances if variance > 0]:
        ax.set_xscale("symlog", linthresh=min(positive))


def draw_probe(result: LinearProbe, name: str) -> Figure:
    """Probe accuracy as a heat map, block × time, and as lines beside the baselines."""
    figure = new_figure(11, 1.8 + 0.32 * len(result.blocks))
    cells, lines = figure.subplots(1, 2, width_ratios=(1.1, 1))
    image = cells.imshow(result.accuracy, aspect="auto", cmap="viridis")
    cells.set_xticks(range(len(result.times)), [f"{t:g}" for t in result.times])
    cells.set_yticks(range(len(result.blocks)), list(result.blocks))
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for b, row in enumerate(result.accuracy):
        for k, value in enumerate(row):
            color = "w" if value < middle else "k"
            cells.text(k, b, f"{value:.3f}", ha="center", va="center", fontsize=7, color=color)
    cells.set(xlabel="t", title=f"{name}: probe accuracy")
    figure.colorbar(image, ax=cells)
    xs = range(len(result.blocks))
    for k, t in enumerate(result.times):
        (line,) = lines.plot(xs, [row[k] for row in result.accuracy], "o-", ms=3, lw=1, label=f"t = {t:g}")
        if result.untrained is not None:
            lines.plot(xs, [row[k] for row in result.untrained], ":", lw=1, color=line.get_color())
    for level, label, style in ((result.pixels, "pixels", "--"), (result.chance, "chance", ":")):
        if level is not None:
            lines.axhline(level, color="k", lw=1, ls=style, label=label)
    lines.set_xticks(xs, list(result.blocks), rotation=90, fontsize=7)
    lines.set(title="dotted, coloured: the untrained network" if result.untrained is not None else "")
    lines.legend(fontsize=7)
    return figure
