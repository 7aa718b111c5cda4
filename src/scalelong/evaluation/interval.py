"""A bootstrap interval for a distance, from each image's influence on it.

A distance T between a sample and a fixed reference is, to first order, T + mean ψ(x_i). Resampling images then is
resampling the ψ_i: a bootstrap of a mean, which costs nothing beside the features. Resampling the images and
taking the whole distance anew costs a matrix square root a replicate and is worse: the replicates of FID carry its
bias in N twice, so their percentiles do not even contain the figure they are meant to surround (docs/evaluation.md
has the numbers).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """Where the figure would fall on drawing the N images anew, the reference staying as it is."""

    low: float
    high: float
    level: float
    replicates: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def bootstrap(
    value: float, influence: Tensor, n: int, level: float = 0.95, replicates: int = 2000, seed: int = 0
) -> Interval:
    """The central `level` of value + mean of n draws from `influence`, over `replicates`.

    `influence` may be of a random subset of the n images: its distribution is what counts.
    """
    psi = (influence - influence.mean()).numpy()
    random = np.random.default_rng(seed)
    means = np.empty(replicates)
    for k in range(replicates):
        means[k] = psi[random.integers(0, len(psi), n)].mean()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value + float(low), value + float(high), level, replicates)
