"""Figures 1 and 12: how norms of hidden features grow during training, and how much they oscillate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong._text import with_interval
from scalelong.experiments.comparison import outer_and_inner
from scalelong.experiments.statistics import CONFIDENCE, Estimate, paired_ratio
from scalelong.paper.drawing import color, label
from scalelong.paper.judge import LESS, Outcome, Table, means_table
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESAMPLES = 2000
BLOCK = 5  # snapshots; the autocorrelation of neighbours is up to 0.5
PAIRS = (("cs", "none"), ("ls", "none"), ("uniform", "none"), ("cs", "uniform"), ("ls", "uniform"))
MEASURES = {
    "norm": "norm of features", "absolute": "absolute oscillation of features",
}  # fmt: skip
MEANING = (
    "Norm: ‖h_i‖ on training batches, mean over the last tenth of training; h_i is what long skip i joins (i = N: the "
    "middle block's output). Absolute oscillation: root mean square of ‖h_i‖ around its smoothed curve over the second "
    "half, the band in Fig. 1. Outer joins are i ≤ N/2, inner joins i > N/2 (geometric means over joins). The paper "
    "does not say which layer Fig. 1 shows. Relative oscillation is our own measure: the standard deviation of "
    "one-step changes of log‖h_i‖ on a fixed probe batch."
)


def figure_1(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare norm and absolute oscillation at the end of training, outer and inner joins apart, paired by seed."""
    outcome = Outcome(notes=[MEANING])
    for trained in studies:
        for key, what in MEASURES.items():
            for side in ("outer", "inner"):
                outcome.claim_ratios(trained, f"{key}_{side}", f"{what} at the {side} joins", PAIRS)
        ours = "relative oscillation of features (our measure)"
        outcome.claim_ratios(trained, "feature_oscillation", ours, PAIRS[:3])
        columns = [
            (f"{key}_{side}", f"{key}, {side} joins") for key in ("norm", "growth") for side in ("outer", "inner")
        ]
        outcome.tables.append(means_table(trained, columns, "none"))
        columns = [("absolute_outer", "absolute oscillation, outer joins"), ("absolute_inner", "inner joins"),
                   ("feature_oscillation", "relative oscillation (ours)"),
                   ("gradient_oscillation", "of the gradient (ours)")]  # fmt: skip
        outcome.tables.append(means_table(trained, columns, "none"))
        by_join = ratios_by_join(trained)
        outcome.tables.append(_join_table(trained, by_join))
        outcome.data["panels"].append(
            _panel(trained) | {"by_join": {v: [e and e.mean for e in row] for v, row in by_join.items()}}
        )
    return outcome


def figure_12(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare the same seed by seed: within one run the snapshots are resampled."""
    note = (
        "Each interval is of one run, not over seeds: bootstrap percentiles over the stored snapshots of the last "
        f"fifth of training ({RESAMPLES} resamples in blocks of {BLOCK} successive snapshots, which resemble each "
        "other; the same snapshots of both runs, which see the same batches)."
    )
    outcome = Outcome(notes=[note, MEANING])
    for trained in studies:
        outcome.data["panels"].append(_panel(trained))
        columns = [("norm_outer", "norm, outer joins"), ("norm_inner", "norm, inner joins")]
        outcome.tables.append(means_table(trained, columns, "none"))
        baseline = trained.norms("none")
        for variant in filter(None, map(trained.named, ("cs", "ls"))):
            for seed, own in trained.norms(variant).items():
                for side, joins in outer_and_inner(len(own["norm"])).items() if seed in baseline else ():
                    ratio = resampled_ratio(_late(own, joins), _late(baseline[seed], joins))
                    text = f"seed {seed}: {label(variant)} lowers the norm at the {side} joins"
                    quantity = f"norm at the {side} joins, {label(variant)} / no scaling, seed {seed}"
                    outcome.claim(trained, text, quantity, LESS, ratio)
    return outcome


def ratios_by_join(trained: Trained) -> dict[str, list[Estimate | None]]:
    """variant → ratio of its norm ‖h_i‖ to the unscaled network's, for every join."""
    base = trained.norms("none")
    found = {}
    for variant in trained.variants:
        own = trained.norms(variant)
        count = min((len(norms["norm"]) for norms in (*own.values(), *base.values())), default=0)
        found[variant] = [
            paired_ratio(*({seed: norms["norm"][i] or 0.0 for seed, norms in side.items()} for side in (own, base)))
            for i in range(count)
        ]
    return {variant: row for variant, row in found.items() if variant != "none" and any(row)}


def _join_table(trained: Trained, ratios: dict[str, list[Estimate | None]]) -> Table:
    count = max(map(len, ratios.values()), default=0)
    rows = [
        [label(variant), *("–" if e is None else with_interval(e.mean, e.low, e.high) for e in row)]
        for variant, row in ratios.items()
    ]
    return Table(
        f"{trained.title}: norm of h_i over no scaling's", ["variant", *(f"i = {k + 1}" for k in range(count))], rows
    )


def resampled_ratio(own: dict[int, float], baseline: dict[int, float]) -> Estimate | None:
    """Return mean(own)/mean(baseline) with its 95 % bootstrap percentile interval over the steps that both have.

    Blocks of BLOCK successive steps, which may wrap around, are resampled: norms of neighbours are correlated.
    """
    shared = sorted(own.keys() & baseline.keys())
    if len(shared) < 8:
        return None
    a, b = (np.array([side[step] for step in shared]) for side in (own, baseline))
    starts = np.random.default_rng(0).integers(0, len(shared), (RESAMPLES, -(-len(shared) // BLOCK), 1))
    picks = ((starts + np.arange(BLOCK)) % len(shared)).reshape(RESAMPLES, -1)[:, : len(shared)]
    ratios = a[picks].mean(1) / b[picks].mean(1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(a.mean() / b.mean()), float(low), float(high), len(shared))


def _late(norms: dict[str, Any], joins: Sequence[int]) -> dict[int, float]:
    """Return step → geometric mean of ‖h_i‖ over joins, over the last fifth of training."""
    late = {}
    for step, row in zip(norms["steps"], norms["raw"], strict=True):
        values = [row[i - 1] for i in joins]
        if step >= 0.8 * norms["steps"][-1] and all(values):
            late[step] = float(np.exp(np.mean(np.log(values))))
    return late


def _panel(trained: Trained) -> dict[str, Any]:
    """Smoothed norms of h_1 and h_N with their absolute oscillation, for every variant and seed."""
    lines = []
    for variant in trained.variants:
        for seed, norms in trained.norms(variant).items():
            for i in (1, len(norms["norm"])):
                curve = [row[i - 1] for row in norms["smooth"]]
                line = {
                    "variant": variant,
                    "seed": seed,
                    "join": i,
                    "last": i > 1,
                    "steps": norms["steps"],
                    "norm": curve,
                }
                lines.append(line | {"band": norms["absolute_oscillation"][i - 1]})
    return {"label": trained.title, "seeds": list(trained.study.seeds), "lines": lines}


def draw_figure_1(data: dict[str, Any], figure: Figure) -> None:
    """Draw ‖h_1‖ and ‖h_N‖ of the first seed with their bands, and the ratio of the final norm by join."""
    rows = data["panels"]
    for (outer, inner, right), panel in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        seed = panel["seeds"][0]
        for ax, last, name in ((outer, False, "‖h_1‖, outermost join"), (inner, True, "‖h_N‖, middle block's output")):
            _draw_norms(ax, panel["lines"], seed, last)
            ax.set(title=f"{name}, seed {seed}", ylabel="norm on training batches")
        outer.legend(fontsize=8)
        for variant, ratios in panel["by_join"].items():
            right.plot(range(1, len(ratios) + 1), ratios, "o-", color=color(variant), label=label(variant))
        right.axhline(1, color="k", lw=1)
        right.set(
            title="final norm over no scaling's", xlabel="join i (N: middle block)", ylabel="geometric mean over seeds"
        )
        right.legend(fontsize=8)


def draw_figure_12(data: dict[str, Any], figure: Figure) -> None:
    """Draw ‖h_1‖ (upper row) and ‖h_N‖ (lower row) during training, one column per seed."""
    panel = data["panels"][0]
    axes = figure.subplots(2, len(panel["seeds"]), squeeze=False, sharey="row")
    for row, last in zip(axes, (False, True), strict=True):
        for ax, seed in zip(row, panel["seeds"], strict=True):
            _draw_norms(ax, panel["lines"], seed, last)
            ax.set_title(f"{'‖h_N‖' if last else '‖h_1‖'}, seed {seed}")
        row[0].set_ylabel("norm")
    if panel["lines"]:
        axes[0][0].legend(fontsize=8)


def _draw_norms(ax: Axes, lines: list[dict[str, Any]], seed: int, last: bool) -> None:
    for line in lines:
        if line["seed"] == seed and line["last"] == last:
            y, band = np.array(line["norm"], dtype=float), line["band"] or 0.0
            ax.plot(line["steps"], y, lw=1.2, color=color(line["variant"]), label=label(line["variant"]))
            ax.fill_between(line["steps"], y - band, y + band, color=color(line["variant"]), alpha=0.2, lw=0)
    ax.set(xlabel="step")
    ax.set_ylim(bottom=0)
