"""The figure of `scalelong theory`: six panels, predictions as lines and measurements as marks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import require
from scalelong.files import atomic_file
from scalelong.theory.report import TheoryReport
from scalelong.theory.stacked import INITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4c566a", "#d08770", "#2e7d5b", "#8e5ea2")
MARKS = {"kaiming": "o", "norm-preserving": "s"}


def draw_theory(report: TheoryReport) -> Any:
    """A matplotlib Figure."""
    figure_module = require("matplotlib.figure", "train", "figures")
    figure = figure_module.Figure(figsize=(15, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    _fit(axes[0, 0], report, "norm-preserving")
    _fit(axes[0, 1], report, "kaiming")
    _paths(axes[0, 2], report)
    _spread(axes[1, 0], report)
    _gradients(axes[1, 1], report)
    _robustness(axes[1, 2], report)
    shape = report.shape
    figure.suptitle(
        f"Section 3 on the network of Eq. 3: m = {shape.width}, N = {shape.skips}, l = {shape.depth}, "
        f"{report.seeds} networks"
    )
    return figure


def save_theory(report: TheoryReport, path: Path | str) -> None:
    """Draw and write; the ending of the name chooses the format."""
    with atomic_file(path) as aside:
        draw_theory(report).savefig(aside, dpi=130, format=Path(path).suffix.removeprefix(".") or "png")


def _fit(ax: Axes, report: TheoryReport, init: str) -> None:
    """Theorem 3.1: E‖h_i‖² against Σ_{j>i} κ_j², with the fitted line."""
    fit = report.fit(init)
    for name, colour in zip(report.scalings, COLOURS, strict=True):
        points = [point for point in fit.points if point.scaling == name]
        ax.plot([p.total for p in points], [p.measured for p in points], MARKS[init], color=colour, label=name)
    ends = [0.0, max(point.total for point in fit.points)]
    ax.plot(ends, [fit.c1 * x + fit.c2 for x in ends], "k-", lw=1, label=f"fit, R² = {fit.r_squared:.3f}")
    ax.set(title=f"Theorem 3.1, {init}", xlabel="Σ κ_j² over j > i", ylabel="E‖h_i‖² / ‖x_t‖²")
    ax.set_ylim(top=1.25 * max(point.measured for point in fit.points))  # room for the legend
    ax.legend(fontsize=8, ncols=2, loc="upper left")


def _paths(ax: Axes, report: TheoryReport) -> None:
    """The path sums with their true gains against every measured E‖h_i‖²."""
    ends: list[float] = []
    for init in INITS:
        for name, colour in zip(report.scalings, COLOURS, strict=True):
            points = [point for point in report.fit(init).points if point.scaling == name]
            label = init if name == "standard" else None
            ax.loglog(
                [p.predicted for p in points], [p.measured for p in points], MARKS[init], color=colour, label=label
            )
            ends += [point.predicted for point in points]
    ax.loglog([min(ends), max(ends)], [min(ends), max(ends)], "k-", lw=1, label="measured = predicted")
    ax.set(title="Path sums with their true gains", xlabel="predicted E‖h_i‖² / ‖x_t‖²", ylabel="measured")
    ax.legend(fontsize=8)


def _spread(ax: Axes, report: TheoryReport) -> None:
    """Theorem 3.1's probability: the spread over networks against the width."""
    for init, colour in zip(INITS, ("#bf616a", "#5e81ac"), strict=True):
        rows = report.width_sweep(init)
        widths = [row.shape.width for row in rows]
        label = f"{init}: m^({report.spread_exponents[init]:.2f})"
        ax.loglog(widths, [row.spread for row in rows], MARKS[init], color=colour, label=label)
    ax.loglog(widths, [row.spread_predicted for row in rows], "k-", lw=1, label="√((2N+1)(5l−3)/m)")
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    ax.set_ylim(0.6 * min(row.spread for row in rows), None)
    ax.minorticks_off()
    ax.set(title="Theorem 3.1: concentration", xlabel="width m", ylabel="std of log ‖h_0‖² over networks")
    ax.legend(fontsize=8)


def _gradients(ax: Axes, report: TheoryReport) -> None:
    """Theorem 3.3: its constant against the number of skips."""
    for init, colour in zip(INITS, ("#bf616a", "#5e81ac"), strict=True):
        rows = report.skip_sweep(init)
        skips = [row.shape.skips for row in rows]
        ax.semilogy(skips, [row.constant for row in rows], MARKS[init] + "-", color=colour, label=init)
    ax.set_xticks(skips)
    ax.set(
        title="Theorem 3.3: the constant it needs",
        xlabel="long skips N",
        ylabel="max ‖∇_W ℓ‖² / (ℓ‖x_t‖²(Σκ_j² + 1))",
    )
    ax.legend(fontsize=8)


def _robustness(ax: Axes, report: TheoryReport) -> None:
    """Theorem 3.4, norm-preserving: what is measured beside the bounds."""
    rows = [row for row in report.robustness if row.init == "norm-preserving"]
    bars = {
        "random δ": [row.perturbed for row in rows],
        "‖∂UNet/∂x_t‖": [row.network for row in rows],
        "main term Σκ_i M₀^i": [row.main_term for row in rows],
        "paper's bound": [row.paper for row in rows],
        "certified bound": [row.certified for row in rows],
    }
    colours = ("#a3be8c", "#2e7d5b", "#ebcb8b", "#d08770", "#bf616a")
    for k, ((label, values), colour) in enumerate(zip(bars.items(), colours, strict=True)):
        ax.bar([x + 0.16 * (k - 2) for x in range(len(rows))], values, 0.16, color=colour, label=label)
    ax.set_yscale("log")
    ax.set_ylim(top=max(row.certified for row in rows) * 1e4)
    ax.set_xticks(range(len(rows)), [row.scaling for row in rows], fontsize=8)
    ax.set(title="Theorem 3.4, norm-preserving", ylabel="‖ΔUNet‖ / ‖δ‖")
    ax.legend(fontsize=8, ncols=2)
