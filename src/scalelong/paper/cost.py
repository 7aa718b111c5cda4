"""What an item costs before it is run: processor minutes at CPU size, GPU-hours from FLOP a step at the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalelong.paper.item import Item
from scalelong.paper.study import Arm, Study

GPU = "A100, 312 TFLOP/s in fp16"
PEAK = 312e12
UTILISATION = 0.35
CORES = 2
ASSUMED = (
    f"one {GPU}, at {UTILISATION:.0%} of it; training alone, without validation, samples and FID. The paper's own "
    "6.7 h for 200,000 steps of 32 CIFAR-10 images are about 6 % of the peak: hours may be several times as many"
)


@dataclass(frozen=True)
class Cost:
    """Of one study: `flop` a step; `hours` of a GPU, or of one core, for all of its runs."""

    study: Study
    runs: int
    steps: int
    batch: int
    flop: float
    hours: float


def cost_of(study: Study, size: str, seeds: Sequence[int] | None = None, steps: int | None = None) -> Cost:
    """Count it. FLOP are those of the unscaled network: scaling adds less than a thousandth."""
    from scalelong.training.presets import size_of

    steps = study.steps if steps is None else steps
    facts = size_of(study.config(Arm("none"), steps))
    runs = len(study.arms) * len(study.seeds if seeds is None else seeds)
    if size == "paper":
        hours = runs * steps * facts["flop_per_step"] / (PEAK * UTILISATION) / 3600
    else:
        hours = runs * (study.seconds or 0.0) * steps / study.steps / 3600
    return Cost(study, runs, steps, facts["batch_size"], float(facts["flop_per_step"]), hours)


def minutes_on_two_cores(item: Item) -> float:
    """What a CPU-sized item takes from nothing on 2 cores; items that share runs take less after one another."""
    training = sum(len(s.arms) * len(s.seeds) * (s.seconds or 0.0) for s in item.cpu) / 60
    return training / CORES + item.minutes


def describe_cost(item: Item, size: str, seeds: Sequence[int] | None = None, steps: int | None = None) -> list[str]:
    """Lines for people: each study, and the sum."""
    costs = [cost_of(study, size, seeds, steps) for study in item.studies(size)]
    lines = []
    for cost in costs:
        amount = f"{cost.hours:,.0f} GPU-hours" if size == "paper" else f"{60 * cost.hours:.0f} min of one core"
        lines.append(
            f"{cost.study.name}: {cost.runs} runs × {cost.steps:,} steps of {cost.batch} images, "
            f"{cost.flop / 1e12:.3g} TFLOP a step: {amount}"
        )
    hours = sum(cost.hours for cost in costs)
    if size == "paper":
        return [*lines, f"in all {hours:,.0f} GPU-hours, assumed: {ASSUMED}"]
    total = 60 * hours / CORES + item.minutes
    return [*lines, f"in all about {total:.0f} min on {CORES} cores, runs shared with other items counted in"]
