"""Figures 1 and 12: how norms of hidden features grow during training, and how much they oscillate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scalelong._text import with_interval
from scalelong.experiments.comparison import outer_and_inner
from scalelong.experiments.statistics import Estimate, paired_ratio
from scalelong.paper.drawing import color, label
from scalelong.paper.judge import LESS, Outcome, Table, means_table
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK = 5  # snapshots; the autocorrelation of neighbours is up to 0.5
PAIRS = (("cs", "none"), ("ls", "none"), ("uniform", "none"), ("cs", "uniform"), ("ls", "uniform"))
MEASURES = {"norm": "norm of features", "absolute": "absolute oscillation of features"}
BY_JOIN = {
    "norm": "norm of h_i over no scaling's",
    "growth": "growth of the norm of h_i minus no scaling's",
    "absolute_oscillation": "absolute oscillation of h_i over no scaling's",
    "relative_oscillation": "relative oscillation of h_i (ours) over no scaling's",
}
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
        by_join = trained.by_join("norm")
        for key, title in BY_JOIN.items():
            outcome.tables.append(_join_table(f"{trained.title}: {title}", trained.by_join(key), key))
        outcome.data["panels"].append(
            _panel(trained) | {"by_join": {v: [e and e.mean for e in row] for v, row in by_join.items()}}
        )
    return outcome


def figure_12(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare the same seed by seed: within one run, over blocks of snapshots."""
    note = (
        "Each interval is of one run, not over seeds: Student's t over blocks of the stored snapshots of the second "
        f"half of training ({BLOCK} successive snapshots each, which resemble each other; the same blocks of both "
        "runs, which see the same batches)."
    )
    outcome = Outcome(notes=[note, MEANING])
    for trained in studies:
        outcome.data["panels"].append(_panel(trained))
        columns = [("norm_outer", "norm, outer joins"), ("norm_inner", "inner joins")]
        columns += [("absolute_outer", "absolute oscillation, outer joins"), ("absolute_inner", "inner joins")]
        outcome.tables.append(means_table(trained, columns, "none"))
        baseline = trained.norms("none")
        for variant in filter(None, map(trained.named, ("cs", "ls"))):
            for seed, own in trained.norms(variant).items():
                for (key, what), (side, joins) in product(MEASURES.items(), outer_and_inner(len(own["norm"])).items()):
                    if seed in baseline:
                        ratio = ratio_in_blocks(_late(own, joins, key), _late(baseline[seed], joins, key), SIZES[key])
                        text = f"seed {seed}: {label(variant)} lowers the {what} at the {side} joins"
                        quantity = f"{what} at the {side} joins, {label(variant)} / no scaling, seed {seed}"
                        outcome.claim(trained, text, quantity, LESS, ratio)
    return outcome


def _join_table(title: str, estimates: dict[str, list[Estimate | None]], key: str) -> Table:
    """Estimates join by join, with a verdict where the interval decides: Fig. 1 predicts less than no scaling."""
    count = max(map(len, estimates.values()), default=0)
    edge = 0.0 if key == "growth" else 1.0
    rows = [[label(variant), *(_cell(e, edge) for e in row)] for variant, row in estimates.items()]
    return Table(title, ["variant", *(f"i = {k + 1}" for k in range(count))], rows)


def _cell(estimate: Estimate | None, edge: float) -> str:
    if estimate is None:
        return "–"
    text = with_interval(estimate.mean, estimate.low, estimate.high)
    if estimate.low is None or estimate.high is None or estimate.low <= edge <= estimate.high:
        return text
    return f"{text} **{'agrees' if estimate.high < edge else 'disagrees'}**"


Rows = npt.NDArray[np.float64]


def _mean_norm(rows: Rows) -> Rows:  # (…, steps, joins) -> (…)
    """Mean over steps of the geometric mean over joins."""
    return np.asarray(np.exp(np.log(rows).mean(-1)).mean(-1))


def _band(rows: Rows) -> Rows:  # (…, steps, joins) -> (…)
    """Geometric mean over joins of the root mean square over steps."""
    return np.asarray(np.exp(np.log(np.square(rows).mean(-2)).mean(-1) / 2))


SIZES = {"norm": _mean_norm, "absolute": _band}


def ratio_in_blocks(
    own: dict[int, list[float]], baseline: dict[int, list[float]], size: Callable[[Rows], Rows] = _mean_norm
) -> Estimate | None:
    """Return the geometric mean over blocks of size(own)/size(baseline), with the t interval of its logarithm.

    Values are step → one per join, of steps that both have. A block has BLOCK successive steps: norms of neighbours are
    correlated, blocks hardly. None for fewer than three blocks.
    """
    shared = sorted(own.keys() & baseline.keys())
    blocks = [shared[k : k + BLOCK] for k in range(0, len(shared) - BLOCK + 1, BLOCK)]
    if len(blocks) < 3:
        return None
    sides = ([float(size(np.array([side[step] for step in block]))) for block in blocks] for side in (own, baseline))
    return paired_ratio(*(dict(enumerate(sizes)) for sizes in sides))


def _late(norms: dict[str, Any], joins: Sequence[int], key: str) -> dict[int, list[float]]:
    """Return step → ‖h_i‖ at every join (key "norm") or its distance to the smoothed curve ("absolute"), over the
    second half of training.
    """
    late = {}
    for step, row, smooth in zip(norms["steps"], norms["raw"], norms["smooth"], strict=True):
        values = [(row[i - 1], smooth[i - 1]) for i in joins]
        if step >= 0.5 * norms["steps"][-1] and all(norm and curve for norm, curve in values):
            late[step] = [norm if key == "norm" else norm - curve for norm, curve in values]
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
