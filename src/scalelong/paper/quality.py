"""Figures 5, 6, 13 and tables 1 to 4: validation losses and distances at the end of training, and their curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scalelong.experiments.comparison import CURVES as TITLES
from scalelong.paper.drawing import GRAY, color, label, log_scale
from scalelong.paper.judge import LESS, Outcome, Region, Table, above, cell, mean, means_table
from scalelong.paper.study import Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = (("cs", "none"), ("ls", "none"), ("cs", "uniform"), ("ls", "uniform"))
SIMILAR = Region(0.95, 1.05)  # "robust": within 5 %, more than the paper's own 3.10/3.01

# FIDs as the paper prints them, by preset and variant.
CIFAR = "cifar10-uvit-s"  # its numbers stand next to CPU-size results
TABLE_1 = {
    CIFAR: {"none": "3.11", "uniform": "3.11", "cs": "2.98", "ls": "3.01"},
    "cifar10-unet": {"none": "3.17", "uniform": "3.14", "cs": "3.05", "ls": "3.07"},
    "celeba64-uvit-s": {"none": "2.87", "uniform": "3.15", "cs": "2.78", "ls": "2.73"},
    "imagenet64-uvit-m": {"none": "5.85", "uniform": "5.80", "cs": "5.68", "ls": "5.75"},
    "imagenet64-uvit-l": {"none": "4.26", "uniform": "4.20", "cs": "3.83", "ls": "4.08"},
    "imagenet64-unet": {"none": "3.77", "uniform": "3.66", "cs": "3.48", "ls": "3.39"},
    "coco-uvit-s": {"none": "5.95", "uniform": "5.88", "cs": "5.77", "ls": "5.60"},
    "coco-unet": {"none": "7.32", "uniform": "7.19", "cs": "7.04", "ls": "6.89"},
}
TABLE_2 = {CIFAR: {
    "ls-reduction-4": "3.06", "ls-reduction-8": "3.10", "ls": "3.01", "ls-activation-elu": "3.08",
    "ls-activation-mish": "3.08", "ls-calibration-scalar": "3.46", "ls-calibration-ie": "3.09",
}}  # fmt: skip
TABLE_3 = {CIFAR: {
    "stable-0.1": "3.77", "stable-0.3": "3.75", "rezero": "3.46", "cs": "2.98", "ls": "3.01", "none": "3.11",
}}  # fmt: skip
SOONER = (
    "Sooner: the steps after which no scaling first reached its own final value, divided by the variant's steps to "
    "that value, seed by seed. A run that never reached it counts with the largest factor it could still have, which "
    "flatters it."
)
TABLE_4 = Table(
    "The paper's FID-10k on CIFAR-10, batch 64",
    ("training step", "5k", "10k", "15k", "20k", "25k", "30k", "35k", "40k", "45k"),
    (
        ("κ_i = κ^(N−i+1)", "67.26", "33.93", "22.78", "16.91", "15.01", "14.01", "12.96", "12.34", "12.26"),
        ("κ_i = κ^(i−1)", "85.19", "23.74", "15.36", "11.38", "10.02", "8.61", "7.92", "7.27", "6.65"),
    ),
)


class Pairs(NamedTuple):
    """Claims on (variant, baseline) pairs: the ratio of a measure at the end lies in the region."""

    pairs: tuple[tuple[str, str], ...]
    verb: str = "lowers"
    region: Region = LESS


def compare_ends(
    studies: Sequence[Trained], size: str, *, claims: Sequence[Pairs], baseline: str = "none",
    printed: Mapping[str, Mapping[str, str]] | None = None, notes: Mapping[str, str] | None = None,
) -> Outcome:  # fmt: skip
    """Compare variants at the end of training, by validation loss and by distance if measured.

    `printed` has the paper's FIDs by preset and variant, `notes` a note by size.
    """
    outcome = Outcome()
    for trained in studies:
        fids = (printed or {}).get(trained.study.preset, (printed or {}).get(CIFAR, {}))
        for one in claims:
            paper = {(a, b): f"FID {fids[a]} / {fids[b]}" for a, b in one.pairs} if fids else {}
            _claim_ends(outcome, trained, one, paper)
        outcome.tables.append(means_table(trained, ends(trained), baseline, fids))
        outcome.data["panels"].append(_end_values(trained))
        outcome.notes += invalid_distance(trained)
    if notes and size in notes:
        outcome.notes.append(notes[size])
    return outcome


def ends(trained: Trained) -> list[tuple[str, str]]:
    """Return the measures at a run's end, (key, title): the validation loss, and the distance if there is one."""
    measures = [(trained.loss, TITLES[trained.loss])]
    if any("frechet" in run.values for run in trained.runs):
        names = {run.names["frechet"] for run in trained.runs if "frechet" in run.names}
        measures.append(("frechet", names.pop() if len(names) == 1 else "Fréchet distance"))
    return measures


def _claim_ends(outcome: Outcome, trained: Trained, claims: Pairs, paper: dict[tuple[str, str], str]) -> None:
    """Claim the pairs for every measure at the end. Distances of samples that are not images get no verdict."""
    for key, title in ends(trained):
        valid = key != "frechet" or not invalid_distance(trained)
        outcome.claim_ratios(
            trained, key, title, claims.pairs, verb=claims.verb, region=claims.region, paper=paper, valid=valid
        )


def invalid_distance(trained: Trained) -> list[str]:
    """Return why distances are not judged, if so: the samples of some variant are not images yet."""
    estimates = [mean(trained.values(variant, "frechet").values()) for variant in trained.variants]
    means = [estimate.mean for estimate in estimates if estimate is not None]
    if not means or max(means) < (edge := mean_image_distance(trained)):
        return []
    return [
        f"{trained.title}: distances of up to {max(means):.3g} exceed {edge:.3g}, the distance of samples that all "
        "equal the mean of the data: the samples are not images yet, and their distances are not judged."
    ]


def mean_image_distance(trained: Trained) -> float:
    """Return tr Σ of the data's features: the Fréchet distance of samples that all equal the mean of the data."""
    from scalelong.evaluation import build_extractor
    from scalelong.runs.run import training_reference

    study = trained.study
    assert study.distance is not None
    config = study.config(study.scalings[0])
    reference = training_reference(config, build_extractor(study.distance.extractor or config.evaluate.extractor))
    return float(reference.features.moments.covariance.trace())


def figure_5(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare validation curves: the loss at the end, and the steps to reach the unscaled network's final value."""
    outcome = Outcome(notes=[SOONER])
    for trained in studies:
        key = _curve_key(trained)
        outcome.claim_ratios(trained, trained.loss, TITLES[trained.loss], OURS)
        for variant in filter(None, map(trained.named, ("cs", "ls"))):
            speedup, bound = trained.speedup(variant, "none", key)
            text = f"{label(variant)} reaches the final {TITLES[key]} of no scaling sooner"
            quantity = f"steps of no scaling / steps of {label(variant)}"
            outcome.claim(trained, text, quantity, above(1.0), speedup, "at least 1.5×", bound)
        outcome.tables.append(means_table(trained, ends(trained)[:1], "none"))
        outcome.data["panels"].append(_curves(trained, key))
    return outcome


def table_4(studies: Sequence[Trained], size: str) -> Outcome:
    """Compare CS with reversed CS at the end and along the curve."""
    outcome = Outcome()
    pair = ("cs", "cs-reverse")
    for trained in studies:
        _claim_ends(outcome, trained, Pairs((pair,)), {pair: "FID-10k 6.65 / 12.26 at 45k"})
        panel = _curves(trained, _curve_key(trained))
        outcome.data["panels"].append(panel)
        outcome.tables += [means_table(trained, ends(trained), "cs-reverse"), _curve_table(trained, panel)]
        outcome.notes += invalid_distance(trained)
    outcome.tables.append(TABLE_4)
    return outcome


def _curve_key(trained: Trained) -> str:
    """Return FID during training if every run has it, else the validation loss."""
    for key in ("fid", "frechet"):
        if trained.runs and all(key in run.curves for run in trained.runs):
            return key
    return trained.loss


def _curves(trained: Trained, key: str) -> dict[str, Any]:
    """Collect the curves of every variant and seed."""
    lines = []
    for run in trained.runs:
        if (curve := run.curves.get(key)) is not None:
            curve = curve.finite()
            values = [round(float(v), 5) for v in curve.values]
            steps = curve.steps.astype(int).tolist()
            lines.append({"variant": run.variant, "seed": run.seed, "steps": steps, "values": values})
    return {"label": trained.title, "title": TITLES[key], "lines": lines}


def _curve_table(trained: Trained, panel: dict[str, Any]) -> Table:
    """Tabulate means over seeds at no more than about nine points of the curve."""
    steps = sorted({step for line in panel["lines"] for step in line["steps"]})
    shown = steps[1 :: max(1, len(steps) // 9)] if len(steps) > 9 else steps
    rows = []
    for variant in trained.variants:
        lines = [dict(zip(x["steps"], x["values"], strict=True)) for x in panel["lines"] if x["variant"] == variant]
        values = [[line[step] for line in lines if line.get(step) is not None] for step in shown]
        rows.append((label(variant), *map(cell, values)))
    return Table(f"{panel['title']} during training", ("training step", *(f"{step:,}" for step in shown)), rows)


def _end_values(trained: Trained) -> dict[str, Any]:
    """Collect the measures at the end of every run."""
    measures = []
    for key, title in ends(trained):
        values = {v: {str(s): round(x, 6) for s, x in trained.values(v, key).items()} for v in trained.variants}
        measures.append({"title": title, "values": values})
    return {"label": trained.title, "measures": measures}


def draw_curves(data: dict[str, Any], figure: Figure) -> None:
    """Draw every curve on the left and, on the right, its difference from the first variant of the same seed."""
    panels = data["panels"]
    for (left, right), panel in zip(figure.subplots(len(panels), 2, squeeze=False), panels, strict=True):
        variants = list(dict.fromkeys(line["variant"] for line in panel["lines"]))
        for variant in variants:
            for k, line in enumerate(x for x in panel["lines"] if x["variant"] == variant):
                name = label(variant) if k == 0 else None
                left.plot(line["steps"], line["values"], lw=1, color=color(variant), label=name)
        left.set(title=panel["label"], xlabel="step", ylabel=panel["title"])
        log_scale(left)
        for variant in variants[1:]:
            steps, changes = relative_change(panel["lines"], variant, variants[0])
            right.plot(steps, changes, "o-", ms=3, color=color(variant), label=label(variant))
        if variants:
            right.axhline(0, color=color(variants[0]), lw=1)
            right.set(title=f"against {label(variants[0])}, mean over seeds", xlabel="step", ylabel="difference, %")
            left.legend(fontsize=8)
            right.legend(fontsize=8)


def relative_change(lines: list[dict[str, Any]], variant: str, baseline: str) -> tuple[list[int], list[float]]:
    """Return steps and the geometric mean over seeds of variant/baseline there, as a change in percent."""
    points: dict[str, dict[tuple[int, int], float]] = {variant: {}, baseline: {}}
    for line in lines:
        if line["variant"] in points:
            for step, value in zip(line["steps"], line["values"], strict=True):
                points[line["variant"]][step, line["seed"]] = value
    logs: dict[int, list[float]] = {}
    for (step, seed), value in points[variant].items():
        if (other := points[baseline].get((step, seed))) is not None and value > 0 and other > 0:
            logs.setdefault(step, []).append(math.log(value / other))
    steps = sorted(logs)
    return steps, [100 * math.expm1(sum(logs[step]) / len(logs[step])) for step in steps]


def draw_ends(data: dict[str, Any], figure: Figure) -> None:
    """Draw one dot per seed and a bar at the mean for every variant; thin lines join the runs of a seed."""
    panels = data["panels"]
    columns = max(len(panel["measures"]) for panel in panels)
    axes = figure.subplots(*((len(panels), columns) if columns > 1 else (1, len(panels))), squeeze=False)
    for k, panel in enumerate(panels):
        for j, measure in enumerate(panel["measures"]):
            ax = axes[k, j] if columns > 1 else axes[0, k]
            variants = list(measure["values"])
            for x, variant in enumerate(variants):
                if values := list(measure["values"][variant].values()):
                    ax.plot([x] * len(values), values, "o", ms=5, alpha=0.7, color=color(variant))
                    ax.plot([x - 0.3, x + 0.3], [sum(values) / len(values)] * 2, "-", color=color(variant))
            for seed in dict.fromkeys(seed for values in measure["values"].values() for seed in values):
                line = [measure["values"][variant].get(seed, math.nan) for variant in variants]
                ax.plot(range(len(variants)), line, "-", lw=0.8, color=GRAY, zorder=0)
            names = [label(variant) for variant in variants]
            ax.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
            ax.set(title=panel["label"], ylabel=measure["title"].split(",")[0])
