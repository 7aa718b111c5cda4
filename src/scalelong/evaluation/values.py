"""The result of a metric: a value, its interval and what a reader must know. Every metric returns one of these."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from scalelong.errors import EvaluationError

LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class Interval:
    """Where the value would fall if the N images were drawn again, with the same reference."""

    low: float
    high: float
    level: float
    replicates: int


@dataclass(frozen=True)
class MetricValue:
    """The result of one metric. `notes` and `warnings` go to the card; users see the warnings at once."""

    value: float
    interval: Interval | None = None
    details: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)


def bootstrap(value: float, influence: Tensor, n: int, replicates: int = 2000, seed: int = 0) -> Interval:
    """Return the central 95 % of value + mean of n draws from `influence`, over `replicates`.

    A distance T between a sample and a fixed reference is, to first order, T + mean ψ(x_i), where ψ is the influence
    of an image. So resampling images is resampling the ψ_i, which costs nothing next to the features. Resampling the
    images and recomputing the distance costs a matrix square root per replicate and is worse: the replicates of FID
    carry its bias in N twice, so their percentiles do not even contain the value (docs/evaluation.md has numbers).
    A random subset of the n images is enough for `influence`.
    """
    psi = (influence - influence.mean()).numpy()
    random = np.random.default_rng(seed)
    means = [psi[random.integers(0, len(psi), n)].mean() for _ in range(replicates)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value + float(low), value + float(high), LEVEL, replicates)


def check_widths(first: int, second: int) -> None:
    if first != second:
        raise EvaluationError(f"features must have the same width on both sides, got {first} and {second}")
