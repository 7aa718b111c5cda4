"""Figures 1 and 12: how much hidden features and gradients oscillate during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong.experiments.statistics import CONFIDENCE, Estimate
from scalelong.paper.claims import label, means_table, ratio_claims, where
from scalelong.paper.drawing import colour, log_scale
from scalelong.paper.item import Outcome
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESAMPLES = 2000


def figure_1(studies: Sequence[Trained], size: str) -> Outcome:
    """Oscillation over the second half of training, paired by seed."""
    claims: list[Claim] = []
    tables, panels = [], []
    for trained in studies:
        pairs = (("cs", "none"), ("ls", "none"), ("uniform", "none"), ("cs", "uniform"), ("ls", "uniform"))
        claims += ratio_claims(trained, "feature_oscillation", "oscillation of the features", pairs)
        claims += ratio_claims(trained, "middle_oscillation", "oscillation of the middle block's output", pairs[:2])
        claims += ratio_claims(trained, "gradient_oscillation", "oscillation of the gradient", pairs[:2])
        measures = [
            ("feature_oscillation", "oscillation of features"),
            ("middle_oscillation", "of the middle block's output"),
            ("gradient_oscillation", "of the gradient"),
        ]
        tables.append(means_table(trained, measures, "none"))
        panels.append(_traces(trained, trained.variants) | {"by_skip": _by_skip(trained)})
    return Outcome(tuple(claims), tuple(tables), {"panels": panels}, (MEANING, *_sizes(studies)))


def _sizes(studies: Sequence[Trained]) -> list[str]:
    """How large the oscillation is at all, beside its ratios."""
    notes = []
    for trained in studies:
        found = [e.mean for v in trained.variants if (e := trained.mean(v, "feature_oscillation")) is not None]
        if found:
            notes.append(
                f"{where(trained)}one step moves the features' norms by {min(found):.2%} (the calmest variant) to "
                f"{max(found):.2%} (the least calm). Ratios between such figures are not instability by themselves."
            )
    return notes


MEANING = (
    "Oscillation: the standard deviation of the jumps of log(norm) over one step, on one fixed probe batch, in the "
    "second half of training; features are the h_i that the long skips join (i = N: the middle block's output)."
)


def figure_12(studies: Sequence[Trained], size: str) -> Outcome:
    """The same seed by seed: within one run the looks are resampled."""
    claims, panels = [], []
    for trained in studies:
        panels.append(_traces(trained, trained.variants))
        for kind in ("cs", "ls"):
            variant = trained.named(kind)
            for seed in trained.seeds if variant is not None else ():
                assert variant is not None
                claims.append(
                    Claim(
                        f"{where(trained)}seed {seed}: {label(variant)} lowers the middle block's oscillation",
                        f"oscillation of the middle block's output, {label(variant)} / no scaling, seed {seed}",
                        below(1.0),
                        resampled_ratio(_late_jumps(trained, variant, seed), _late_jumps(trained, "none", seed)),
                    )
                )
    measures = [("middle_oscillation", "oscillation of the middle block's output")]
    tables = tuple(means_table(trained, measures, "none") for trained in studies)
    note = (
        "Intervals are of one run each: the bootstrap's percentiles over the looks of the second half "
        f"({RESAMPLES} resamples, the same looks of both runs)."
    )
    return Outcome(tuple(claims), tables, {"panels": panels}, (note, MEANING))


def resampled_ratio(jumps: Any, baseline: Any, seed: int = 0) -> Estimate | None:
    """std(jumps)/std(baseline) with the bootstrap's 95 % percentile interval over looks that both have."""
    if jumps is None or baseline is None:
        return None
    shared = sorted(set(jumps) & set(baseline))
    if len(shared) < 8:
        return None
    own, theirs = (np.array([side[step] for step in shared]) for side in (jumps, baseline))
    if own.std() == 0 or theirs.std() == 0:
        return None
    picks = np.random.default_rng(seed).integers(0, len(shared), (RESAMPLES, len(shared)))
    with np.errstate(divide="ignore"):
        ratios = own[picks].std(1) / theirs[picks].std(1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(own.std() / theirs.std()), float(low), float(high), len(shared))


def _late_jumps(trained: Trained, variant: str, seed: int) -> dict[int, float] | None:
    """step → the jump of log‖h_N‖ on the probe, over the second half."""
    log = trained.watch(variant, seed)
    jumps = None if log is None else log.matrix("jump", "probe", "backbone")
    if log is None or jumps is None:
        return None
    last = jumps[:, -1]
    keep = log.late() & np.isfinite(last)
    return {int(step): float(value) for step, value in zip(log.steps[keep], last[keep], strict=True)}


def _traces(trained: Trained, variants: Sequence[str]) -> dict[str, Any]:
    """‖h_N‖ on the probe over training, for every variant and seed."""
    lines = []
    for variant in variants:
        for seed in trained.seeds:
            log = trained.watch(variant, seed)
            norms = None if log is None else log.matrix("probe", "backbone")
            if log is not None and norms is not None:
                values = [round(float(v), 4) if np.isfinite(v) else None for v in norms[:, -1]]
                steps = log.steps.astype(int).tolist()
                lines.append({"variant": variant, "seed": seed, "steps": steps, "norm": values})
    return {"label": trained.title, "seeds": list(trained.seeds), "lines": lines}


def _by_skip(trained: Trained) -> dict[str, list[float]]:
    """variant → oscillation of h_1 … h_N, mean over seeds."""
    found = {}
    for variant in trained.variants:
        rows = [
            spread
            for seed in trained.seeds
            if (log := trained.watch(variant, seed)) is not None
            and (spread := log.oscillation("probe", "backbone")) is not None
        ]
        if rows:
            found[variant] = [round(float(v), 6) for v in np.mean(rows, axis=0)]
    return found


def draw_figure_1(data: dict[str, Any], figure: Figure) -> None:
    rows = data["panels"]
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for (left, right), panel in zip(axes, rows, strict=True):
        seed = panel["seeds"][0]
        _trace(left, panel["lines"], seed)
        left.set(title=f"{panel['label']}, seed {seed}", ylabel="‖h_N‖, middle block's output")
        left.set_ylim(bottom=0)
        for variant, spreads in panel["by_skip"].items():
            right.plot(range(1, len(spreads) + 1), spreads, "o-", color=colour(variant), label=label(variant))
        right.set(title="oscillation in the second half, mean over seeds", xlabel="long skip i (N: middle block)")
        right.set(ylabel="std of one-step jumps of log‖h_i‖")
        log_scale(right)
        right.legend(fontsize=8)


def _trace(ax: Axes, lines: list[dict[str, Any]], seed: int) -> None:
    for line in lines:
        if line["seed"] == seed:
            ax.plot(line["steps"], line["norm"], lw=1, color=colour(line["variant"]), label=label(line["variant"]))
    ax.set(xlabel="step")


def draw_figure_12(data: dict[str, Any], figure: Figure) -> None:
    seeds = max(len(panel["seeds"]) for panel in data["panels"])
    axes = figure.subplots(len(data["panels"]), seeds, squeeze=False, sharey="row")
    for row, panel in zip(axes, data["panels"], strict=True):
        for ax, seed in zip(row, panel["seeds"], strict=False):
            _trace(ax, panel["lines"], seed)
            ax.set_title(f"{panel['label']}, seed {seed}")
        row[0].set_ylabel("‖h_N‖, middle block's output")
        row[0].set_ylim(bottom=0)  # of all, once everything is drawn
        if panel["lines"]:
            row[0].legend(fontsize=8)
