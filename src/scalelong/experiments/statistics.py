"""Statistics over seeds: means with Student's t intervals, ratios paired by seed, and acceleration factors.

Runs of one seed share their data order, noise and initial weights, so most of what differs between seeds is common to
them. A ratio that is paired by seed removes it; a comparison of two means does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelong._text import number
from scalelong.errors import invalid, require

if TYPE_CHECKING:
    from scalelong.runs.logs import Series

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` values with its interval; `low` and `high` are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    n: int
    confidence: float = CONFIDENCE

    @property
    def excludes_one(self) -> bool:
        """Whether the interval of a ratio excludes "no change"; False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean of independent values with its Student t interval: mean ± t_{n−1} · s/√n."""
    if not values or not all(map(math.isfinite, values)):
        raise invalid("values", "one or more finite numbers", list(values))
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(mean, None, None, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    special = require("scipy.special", "train", "confidence intervals")
    half = float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def slope_interval(points: Sequence[tuple[float, float]]) -> Estimate:
    """Least-squares slope of y against x with its Student t interval: slope ± t_{n−2} · s/√Σ(x − x̄)²."""
    fit = linear_fit([[x] for x, _ in points], [y for _, y in points])
    if fit is None:
        raise invalid("points", "two or more different x", list(points))
    return fit[0]


def linear_fit(rows: Sequence[Sequence[float]], y: Sequence[float]) -> list[Estimate] | None:
    """Least-squares coefficients of y on the columns of `rows` and a constant, with Student t intervals.

    Returns None if the columns do not determine them.
    """
    x = np.asarray(rows, dtype=float)  # (n, columns)
    x, target = x - x.mean(0), np.asarray(y, dtype=float) - np.mean(y)  # centred: the constant drops out
    n, columns = x.shape
    if np.linalg.matrix_rank(x) < columns:
        return None
    slopes = np.linalg.lstsq(x, target, rcond=None)[0]
    freedom = n - columns - 1
    if freedom < 1:
        return [Estimate(float(slope), None, None, n) for slope in slopes]
    residual = float(np.square(target - x @ slopes).sum()) / freedom
    special = require("scipy.special", "train", "confidence intervals")
    halves = special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * np.sqrt(residual * np.diag(np.linalg.inv(x.T @ x)))
    return [Estimate(float(b), float(b - half), float(b + half), n) for b, half in zip(slopes, halves, strict=True)]


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Geometric mean of value/baseline over the seeds in both, with the paired t interval of its logarithm.

    Losses, distances, oscillations and times are positive, so factors compare them. Returns None if no seed is in
    both or a value is not positive.
    """
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds or not all(0 < side[seed] < math.inf for seed in seeds for side in (values, baseline)):
        return None
    logs = mean_interval([math.log(values[seed] / baseline[seed]) for seed in seeds])
    low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (logs.low, logs.high))
    return Estimate(math.exp(logs.mean), low, high, logs.n)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Mean of value − baseline over the seeds in both, with its paired t interval. None if no seed is in both or
    a value is not finite.
    """
    changes = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    return mean_interval(changes) if changes and all(map(math.isfinite, changes)) else None


@dataclass(frozen=True)
class Acceleration:
    """How much sooner a variant reaches the baseline's final value; `factor` 1.5 means two thirds of its steps.

    steps     seed → the first step at or below the baseline's final value; None if the run never reaches it
    baseline  seed → the same step of the baseline itself, which may lie before its end
    factor    geometric mean of baseline/steps over seeds; None if a seed never reaches the value, because a mean over
              the others would drop exactly the slow ones
    at_most   the largest factor those seeds could still have: they would reach it right after their last step; None if
              there is no such seed, or if all of them became non-finite
    reached   number of seeds that reach the value, of `seeds`
    failed    number of seeds that became non-finite
    """

    steps: dict[int, float | None]
    baseline: dict[int, float]
    factor: Estimate | None
    at_most: float | None
    reached: int
    seeds: int
    failed: int = 0

    @property
    def bound(self) -> str:
        """In words, if a seed never reaches the value; otherwise empty."""
        if self.factor is not None:
            return ""
        factors = [self.baseline[seed] / step for seed, step in self.steps.items() if step is not None]
        listed = f" ({', '.join(f'{factor:.2f}×' for factor in factors)})" if factors else ""
        words = [f"reached in {self.reached} of {self.seeds}{listed}"]
        if self.at_most is not None:
            words.append(f"below {self.at_most:.2f}{' in the others' if self.reached else ''}")
        return ", ".join([*words, *([f"{self.failed} became non-finite"] if self.failed else [])])

    @property
    def texts(self) -> tuple[str, str]:
        """1.31× and [1.10, 1.55], or a bound and in how many seeds the value was reached."""
        if self.factor is None:
            return "–" if self.reached else "not reached", self.bound
        mean, low, high = self.factor.mean, self.factor.low, self.factor.high
        return f"{mean:.2f}×", "" if low is None else f"[{low:.2f}, {high:.2f}]"


def acceleration(
    curves: Mapping[int, Series], baseline: Mapping[int, Series], failed: Collection[int] = ()
) -> Acceleration | None:
    """Compare curves seed by seed. Both sides are timed the same way, so equal curves give exactly 1.

    A seed of `failed`, whose run became non-finite, never reaches the value. A noisy curve touches its final value
    before its end. To count the baseline's full length against a variant's first touch would favour every variant.
    """
    steps: dict[int, float | None] = {}
    reference: dict[int, float] = {}
    bounds = []
    lost = baseline.keys() & set(failed)
    for seed in sorted(baseline.keys() & (curves.keys() | lost)):
        curve, target = curves[seed].finite() if seed not in lost else None, baseline[seed].last
        if target is None or len(baseline[seed].finite()) < 2 or (curve is not None and len(curve) < 2):
            continue  # one measurement does not say when a value was reached
        own = first_reached(baseline[seed], target)
        assert own is not None
        reference[seed], steps[seed] = own, None if curve is None else first_reached(curve, target)
        if steps[seed] is None and curve is not None:
            bounds.append(own / float(curve.steps[-1]))
    if not steps:
        return None
    reached = {seed: step for seed, step in steps.items() if step is not None}
    # Inverted: fewer steps, larger factor.
    factor = None if bounds or lost else paired_ratio(reference, reached)
    return Acceleration(steps, reference, factor, max(bounds, default=None), len(reached), len(steps), len(lost))


def first_reached(curve: Series, target: float) -> float | None:
    """First step at which `curve` is at or below `target`, interpolated linearly between two measurements."""
    curve = curve.finite()
    below = np.flatnonzero(curve.values <= target)
    if not len(below):
        return None
    k = int(below[0])
    if k == 0:
        return float(curve.steps[0])
    (s0, s1), (v0, v1) = curve.steps[k - 1 : k + 1], curve.values[k - 1 : k + 1]
    return float(s0 + (s1 - s0) * (v0 - target) / (v0 - v1))


def plus_minus(estimate: Estimate) -> str:
    """0.4321 ± 0.0012: the mean and half the width of the interval."""
    if estimate.low is None or estimate.high is None:
        return number(estimate.mean)
    half = (estimate.high - estimate.low) / 2
    return f"{number(estimate.mean)} ± {f'{half:,.0f}' if half >= 100 else f'{half:.2g}'}"


def change(ratio: Estimate) -> str:
    """A ratio as a change, −2.1 % [−3.0, −1.2], or far from 1 as a factor, ×0.31 [0.24, 0.4]."""
    ends = [end for end in (ratio.low, ratio.high) if end is not None]
    if not 0.5 < ratio.mean < 2 or any(not 0.25 < end < 4 for end in ends):
        mean, *texts = (f"{value:.3g}" for value in (ratio.mean, *ends))
        mean = f"×{mean}"
    else:
        mean, *texts = (_signed((value - 1) * 100) for value in (ratio.mean, *ends))
        mean += " %"
    return f"{mean} [{', '.join(texts)}]" if texts else mean


def difference(estimate: Estimate) -> str:
    """A difference with its interval: −0.21 [−0.34, −0.08]."""
    mean, *ends = (_signed(value, 2) for value in (estimate.mean, estimate.low, estimate.high) if value is not None)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def _signed(value: float, digits: int = 1) -> str:
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def statistics_note(seeds: int) -> str:
    """How the numbers of a comparison are computed, to print beside them."""
    if seeds < 2:
        return (
            "One seed: there is no interval, and a difference may be chance. "
            "Runs of the same seed share data order, noise and initial weights; --seeds 3 gives intervals."
        )
    return (
        f"Mean ± half the width of the {CONFIDENCE * 100:g} % Student t interval over {seeds} seeds. Differences are "
        "paired by seed (same data order, noise and initial weights): the geometric mean of the ratios to the "
        f"baseline's run of the same seed, with the {CONFIDENCE * 100:g} % paired t interval of their logarithms. "
        "Intervals are not corrected for the number of comparisons."
    )
