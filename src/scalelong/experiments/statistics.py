"""Means over seeds with Student's t intervals, and comparisons paired by seed.

Runs that share a seed share their data order, noise and initial weights, so that much of what differs between seeds
is common to them. Comparing seed by seed takes it out; comparing two means does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scalelong.errors import ScaleLongError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` values; `low` and `high` are None where one value alone gives no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent values and its Student t interval: mean ± t_{n−1} · s/√n."""
    _check(values, confidence)
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return Estimate(mean, None, None, n, confidence)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = t_quantile((1 + confidence) / 2, n - 1) * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n, confidence)


def paired_ratio(
    values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = CONFIDENCE
) -> Estimate | None:
    """The geometric mean of value/baseline over the seeds that both have, with the paired t interval of its logarithm.

    A ratio, for losses, distances, oscillations and times are positive and compared by factors. None where no seed
    is in both or a value is not positive.
    """
    shared = sorted(set(values) & set(baseline))
    if not shared or any(not (_positive(values[s]) and _positive(baseline[s])) for s in shared):
        return None
    logs = mean_interval([math.log(values[s] / baseline[s]) for s in shared], confidence)
    low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (logs.low, logs.high))
    return Estimate(math.exp(logs.mean), low, high, logs.n, confidence)


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution."""
    from scalelong.errors import require

    special = require("scipy.special", "train", "confidence intervals")
    return float(special.stdtrit(freedom, share))


def statement(seeds: int, confidence: float = CONFIDENCE) -> str:
    """What the figures of a comparison are, in words that belong beside them."""
    if seeds < 2:
        return (
            "One seed: there is no interval, and a difference may be chance. "
            "Runs of the same seed share data order, noise and initial weights; --seeds 3 gives intervals."
        )
    return (
        f"mean ± half the width of the {confidence * 100:g} % Student t interval over {seeds} seeds. Differences are "
        "paired by seed (same data order, noise and initial weights): the geometric mean of the ratios to the "
        f"baseline's run of the same seed, with the {confidence * 100:g} % paired t interval of their logarithms. "
        "Intervals are not corrected for the number of comparisons."
    )


def _check(values: Sequence[float], confidence: float) -> None:
    if not values:
        raise ScaleLongError("a mean needs at least one value")
    if any(not math.isfinite(value) for value in values):
        raise ScaleLongError(f"a mean of values that are not finite has no meaning: {list(values)}")
    if not 0 < confidence < 1:
        raise ScaleLongError(f"confidence is between 0 and 1, not {confidence}")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
