"""Figures 1 and 12: how much hidden features and gradients oscillate during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong.experiments.statistics import CONFIDENCE, Estimate
from scalelong.paper.drawing import color, label, log_scale
from scalelong.paper.judge import LESS, Outcome, mean, means_table
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scalelong.runs.logs import StabilityArrays

RESAMPLES = 2000
PAIRS = (("cs", "none"), ("ls", "none"), ("uniform", "none"), ("cs", "uniform"), ("ls", "uniform"))
MIDDLE = "oscillation of the middle block's output"
MEANING = (
    "Oscillation: the standard deviation of one-step changes of log(norm) on a fixed probe batch, over the second half "
    "of training. Features are the h_i that the long skips join (i = N: the middle block's output)."
)


def figure_1(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare oscillation over the second half of training, paired by seed."""
    outcome = Outcome(notes=[MEANING])
    for trained in studies:
        outcome.claim_ratios(trained, "feature_oscillation", "oscillation of the features", PAIRS)
        outcome.claim_ratios(trained, "middle_oscillation", MIDDLE, PAIRS[:2])
        outcome.claim_ratios(trained, "gradient_oscillation", "oscillation of the gradient", PAIRS[:2])
        measures = [
            ("feature_oscillation", "oscillation of features"),
            ("middle_oscillation", "of the middle block's output"),
            ("gradient_oscillation", "of the gradient"),
        ]
        outcome.tables.append(means_table(trained, measures, "none"))
        outcome.data["panels"].append(_norms(trained) | {"by_skip": _by_skip(trained)})
        estimates = [mean(trained.values(v, "feature_oscillation").values()) for v in trained.variants]
        if means := [
            estimate.mean for estimate in estimates if estimate is not None
        ]:  # how large the oscillation is at all
            outcome.notes.append(
                f"{trained.title}: one step changes the features' norms by {min(means):.2%} (the calmest variant) to "
                f"{max(means):.2%} (the least calm). Ratios of such numbers are not instability by themselves."
            )
    return outcome


def figure_12(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare the same seed by seed: within one run the snapshots are resampled."""
    note = (
        "Each interval is of one run: the bootstrap percentiles over the snapshots of the second half "
        f"({RESAMPLES} resamples, the same snapshots of both runs)."
    )
    outcome = Outcome(notes=[note, MEANING])
    for trained in studies:
        outcome.data["panels"].append(_norms(trained))
        outcome.tables.append(means_table(trained, [("middle_oscillation", MIDDLE)], "none"))
        baseline = trained.logs("none")
        for variant in filter(None, map(trained.named, ("cs", "ls"))):
            logs = trained.logs(variant)
            for seed in trained.study.seeds:
                ratio = resampled_ratio(_late_jumps(logs.get(seed)), _late_jumps(baseline.get(seed)))
                text = f"seed {seed}: {label(variant)} lowers the middle block's oscillation"
                quantity = f"{MIDDLE}, {label(variant)} / no scaling, seed {seed}"
                outcome.claim(trained, text, quantity, LESS, ratio)
    return outcome


def resampled_ratio(jumps: dict[int, float], baseline: dict[int, float]) -> Estimate | None:
    """Return std(jumps)/std(baseline) with its 95 % bootstrap percentile interval over the steps that both have."""
    shared = sorted(jumps.keys() & baseline.keys())
    if len(shared) < 8:
        return None
    own, other = (np.array([side[step] for step in shared]) for side in (jumps, baseline))
    if own.std() == 0 or other.std() == 0:
        return None
    picks = np.random.default_rng(0).integers(0, len(shared), (RESAMPLES, len(shared)))
    with np.errstate(divide="ignore"):
        ratios = own[picks].std(1) / other[picks].std(1)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(own.std() / other.std()), float(low), float(high), len(shared))


def _late_jumps(log: StabilityArrays | None) -> dict[int, float]:
    """Return step → the one-step change of log‖h_N‖ on the probe, over the second half."""
    jumps = None if log is None else log.matrix("jump", "probe", "backbone")
    if log is None or jumps is None:
        return {}
    last = jumps[:, -1]
    keep = log.late() & np.isfinite(last)
    return {int(step): float(value) for step, value in zip(log.steps[keep], last[keep], strict=True)}


def _norms(trained: Trained) -> dict[str, Any]:
    """Collect ‖h_N‖ on the probe during training, for every variant and seed."""
    lines = []
    for variant in trained.variants:
        for seed, log in trained.logs(variant).items():
            if (norms := log.matrix("probe", "backbone")) is not None:
                values = [round(float(v), 4) if np.isfinite(v) else None for v in norms[:, -1]]
                steps = log.steps.astype(int).tolist()
                lines.append({"variant": variant, "seed": seed, "steps": steps, "norm": values})
    return {"label": trained.title, "seeds": list(trained.study.seeds), "lines": lines}


def _by_skip(trained: Trained) -> dict[str, list[float]]:
    """Return variant → oscillation of h_1 … h_N, mean over seeds."""
    spreads = {}
    for variant in trained.variants:
        spread = [log.oscillation("probe", "backbone") for log in trained.logs(variant).values()]
        if rows := [row for row in spread if row is not None]:
            spreads[variant] = [round(float(v), 6) for v in np.mean(rows, axis=0)]
    return spreads


def draw_figure_1(data: dict[str, Any], figure: Figure) -> None:
    """Draw ‖h_N‖ of the first seed on the left, oscillation by skip on the right."""
    rows = data["panels"]
    for (left, right), panel in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        seed = panel["seeds"][0]
        _draw_norms(left, panel["lines"], seed)
        left.set(title=f"{panel['label']}, seed {seed}", ylabel="‖h_N‖, middle block's output")
        left.set_ylim(bottom=0)
        for variant, spreads in panel["by_skip"].items():
            right.plot(range(1, len(spreads) + 1), spreads, "o-", color=color(variant), label=label(variant))
        right.set(title="oscillation in the second half, mean over seeds", xlabel="long skip i (N: middle block)")
        right.set(ylabel="std of one-step changes of log‖h_i‖")
        log_scale(right)
        right.legend(fontsize=8)


def draw_figure_12(data: dict[str, Any], figure: Figure) -> None:
    """Draw ‖h_N‖ during training, one panel per seed."""
    seeds = max(len(panel["seeds"]) for panel in data["panels"])
    axes = figure.subplots(len(data["panels"]), seeds, squeeze=False, sharey="row")
    for row, panel in zip(axes, data["panels"], strict=True):
        for ax, seed in zip(row, panel["seeds"], strict=False):
            _draw_norms(ax, panel["lines"], seed)
            ax.set_title(f"{panel['label']}, seed {seed}")
        row[0].set_ylabel("‖h_N‖, middle block's output")
        row[0].set_ylim(bottom=0)  # shared by the row, so after everything is drawn
        if panel["lines"]:
            row[0].legend(fontsize=8)


def _draw_norms(ax: Axes, lines: list[dict[str, Any]], seed: int) -> None:
    for line in lines:
        if line["seed"] == seed:
            ax.plot(line["steps"], line["norm"], lw=1, color=color(line["variant"]), label=label(line["variant"]))
    ax.set(xlabel="step")
