"""The figure of `scalelong robustness`: Fig. 3c for a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import require
from scalelong.experiments.robustness import Robustness
from scalelong.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_robustness(result: Robustness) -> Any:
    """A matplotlib Figure: change of the prediction and of the loss, distance, Lipschitz constants."""
    figure_module = require("matplotlib.figure", "train", "figures")
    panels = 4 if result.distances else 3
    figure = figure_module.Figure(figsize=(4.2 * panels, 4), layout="constrained")
    change, loss, *rest = figure.subplots(1, panels)
    _by_time(change, result, "change")
    change.set(title="change of the prediction", ylabel="E‖Δε̂‖²/m", yscale="log")
    _by_time(loss, result, "loss")
    loss.set(title="loss with extra noise", ylabel="E‖ε − ε̂(x_t + δ)‖²/m")
    if result.distances:
        _distances(rest[0], result)
    _lipschitz(rest[-1], result)
    figure.suptitle(f"{result.run}: {result.scaling.get('kind', '')}, step {result.step}")
    return figure


def save_robustness(result: Robustness, path: Path | str) -> None:
    """Draw and write; the ending of the name chooses the format."""
    with atomic_file(path) as aside:
        draw_robustness(result).savefig(aside, dpi=130, format=Path(path).suffix.removeprefix(".") or "png")


def _by_time(ax: Axes, result: Robustness, figure: str) -> None:
    rows = [row for row in result.sensitivity if row.variance or figure == "loss"]
    xs = [row.variance for row in rows]
    for b, (low, high) in enumerate(pairwise(result.edges)):
        values = [math.nan if (one := row.by_time[b]) is None else getattr(one, figure) for row in rows]
        ax.plot(xs, values, "o-", ms=3, lw=1, label=f"t from {low:g} to {high:g}")
    ax.plot(xs, [getattr(row.overall, figure) for row in rows], "ko-", ms=3, label="all")
    _variances(ax, xs)
    ax.legend(fontsize=7)


def _distances(ax: Axes, result: Robustness) -> None:
    xs = [d.variance for d in result.distances]
    ax.plot(xs, [d.value for d in result.distances], "ko-", ms=3)
    ends = [(d.variance, d.low, d.high) for d in result.distances if d.low is not None and d.high is not None]
    for variance, low, high in ends:
        ax.plot([variance, variance], [low, high], "k-", lw=1)
    ax.set(title=f"{result.metric}, {result.samples} samples", ylabel="distance to the data")
    _variances(ax, xs)


def _lipschitz(ax: Axes, result: Robustness) -> None:
    middles = [(low + high) / 2 for low, high in pairwise(result.edges)]
    pairs = list(zip(middles, result.lipschitz, strict=False))
    ax.plot([t for t, _ in pairs], [one.network for _, one in pairs], "ko-", ms=3, label="‖∂ε̂/∂x_t‖, measured")
    bounds = [(t, 10**one.log10_bound) for t, one in pairs if one.log10_bound is not None and one.log10_bound < 300]
    ax.plot([t for t, _ in bounds], [b for _, b in bounds], "s--", ms=3, color="#bf616a", label="Theorem 3.4's bound")
    ax.set(title="local Lipschitz constant", xlabel="t", yscale="log")
    ax.legend(fontsize=7)


def _variances(ax: Axes, xs: Sequence[float]) -> None:
    positive = [x for x in xs if x > 0]
    ax.set(xlabel="σ_δ², variance of the extra noise")
    if positive:
        ax.set_xscale("symlog", linthresh=min(positive))
