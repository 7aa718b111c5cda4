"""Steps to reach the baseline's final validation loss, and the factor by which a variant is sooner there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalelong.experiments.statistics import CONFIDENCE, Estimate, paired_ratio
from scalelong.runs.logs import Series


@dataclass(frozen=True)
class Acceleration:
    """How much sooner than the baseline: `factor` 1.5 means two thirds of its steps.

    steps     seed → the step at which the run first was at the baseline's final value; None: never
    baseline  seed → the same of the baseline itself, which may lie before its end
    factor    geometric mean of baseline/steps over the seeds; None where a seed never got there, for a mean over
              the others would leave out just the slow ones
    at_most   where some never got there: the greatest factor that they could still have, had they arrived right after
              their last step
    """

    steps: dict[int, float | None]
    baseline: dict[int, float]
    factor: Estimate | None
    at_most: float | None

    @property
    def reached(self) -> int:
        return sum(step is not None for step in self.steps.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": {str(seed): step for seed, step in self.steps.items()},
            "baseline": {str(seed): step for seed, step in self.baseline.items()},
            "factor": None if self.factor is None else asdict(self.factor),
            "at_most": self.at_most,
            "reached": self.reached,
            "seeds": len(self.steps),
        }


def first_reached(curve: Series, target: float) -> float | None:
    """The step at which a curve first is at or below `target`, between two validations on the straight line."""
    curve = curve.finite()
    below = np.flatnonzero(curve.values <= target)
    if not len(below):
        return None
    k = int(below[0])
    if k == 0:
        return float(curve.steps[0])
    (s0, s1), (v0, v1) = curve.steps[k - 1 : k + 1], curve.values[k - 1 : k + 1]
    return float(s0 + (s1 - s0) * (v0 - target) / (v0 - v1))


def acceleration(
    curves: Mapping[int, Series], baseline: Mapping[int, Series], confidence: float = CONFIDENCE
) -> Acceleration | None:
    """Compare validation curves by seed. Both sides are timed alike, so that equal curves give exactly 1.

    Counting the baseline's whole length against a variant's first touch would favour every variant, for a noisy
    curve touches its final value before its end.
    """
    steps: dict[int, float | None] = {}
    own: dict[int, float] = {}
    bounds = []
    for seed in sorted(set(curves) & set(baseline)):
        theirs, target = curves[seed].finite(), baseline[seed].last
        if target is None or not len(theirs):
            continue
        reference = first_reached(baseline[seed], target)
        assert reference is not None
        own[seed], steps[seed] = reference, first_reached(theirs, target)
        if steps[seed] is None:
            bounds.append(reference / float(theirs.steps[-1]))
    if not steps:
        return None
    arrived = {seed: step for seed, step in steps.items() if step is not None}
    # The ratio of steps is inverted: fewer steps are a greater factor.
    factor = paired_ratio(own, arrived, confidence) if len(arrived) == len(steps) else None
    return Acceleration(steps, own, factor, max(bounds) if bounds else None)
