"""Metrics by nearest neighbours in feature space: precision, recall, density, coverage.

A ball around an image reaches to its k-th nearest neighbour in the same set. Precision and recall (Kynkäänniemi et al.,
2019, k = 3) are the shares of samples inside a ball of the reference, and of reference images inside a ball of the
samples. Density and coverage (Naeem et al., 2020, k = 5) count the balls of the reference around a sample, and the
share of those balls that contain a sample: one outlier in the reference weighs less in them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scalelong.errors import EvaluationError
from scalelong.evaluation.statistics import FeatureSet
from scalelong.evaluation.values import MetricValue, bootstrap, check_widths

PRECISION_K, DENSITY_K = 3, 5
ROWS = 1000  # of a block of the distance matrix, which is never stored


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances (a, b) in float32, by one matrix product."""
    return torch.cdist(x.float(), y.float(), compute_mode="use_mm_for_euclid_dist")


def radii(features: Tensor, k: int) -> Tensor:
    """(n,): the distance of each image to its k-th nearest neighbour in the set."""
    if len(features) <= k:
        raise EvaluationError(f"the {k}-th nearest neighbour needs at least {k + 1} images, got {len(features)}")
    # The image itself is at distance 0 and comes first.
    return torch.cat([distances(part, features).kthvalue(k + 1).values for part in features.split(ROWS)])


@dataclass(frozen=True)
class Membership:
    """Which points lie in which balls, without the (points, balls) matrix."""

    balls_around: Tensor  # (points,): the number of balls that contain each point
    alone: Tensor  # (balls,): the number of points that lie in this ball and in no other
    filled: Tensor  # (balls,) bool: whether the ball contains a point
    only: Tensor  # (points,): the number of balls that contain this point and no other


def membership(points: Tensor, centres: Tensor, radius: Tensor) -> Membership:
    """Return which (m, D) points lie in the balls of `radius` (n,) around (n, D) centres."""
    check_widths(points.shape[1], centres.shape[1])
    around = torch.zeros(len(points), dtype=torch.int64)
    alone, inside = (torch.zeros(len(centres), dtype=torch.int64) for _ in range(2))
    last = torch.zeros(len(centres), dtype=torch.int64)  # of a ball with one point: the index of that point
    for start in range(0, len(points), ROWS):
        block = distances(points[start : start + ROWS], centres) <= radius  # (b, n)
        counts = block.sum(dim=1)
        around[start : start + ROWS] = counts
        alone += block[counts == 1].sum(dim=0)
        inside += block.sum(dim=0)
        last = torch.where(block.any(dim=0), start + block.int().argmax(dim=0), last)
    only = torch.zeros(len(points), dtype=torch.int64)
    single = inside == 1
    only.index_add_(0, last[single], torch.ones(int(single.sum()), dtype=torch.int64))
    return Membership(around, alone, inside > 0, only)


def precision(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """Return the share of samples that lie in a ball of the reference."""
    x, y = _features(samples, reference)
    inside = membership(x, y, radii(y, PRECISION_K)).balls_around > 0
    return _as_share(_mean(inside.double(), PRECISION_K, len(y), interval, seed))


def recall(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """Return the share of reference images that lie in a ball of the samples."""
    x, y = _features(samples, reference)
    members = membership(y, x, radii(x, PRECISION_K))
    value = float((members.balls_around > 0).double().mean())
    return _jackknife(value, members.alone.double() / len(y), PRECISION_K, len(y), interval, seed)


def density(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """Return the mean number of balls of the reference around a sample, over k."""
    x, y = _features(samples, reference)
    around = membership(x, y, radii(y, DENSITY_K)).balls_around
    return _mean(around.double() / DENSITY_K, DENSITY_K, len(y), interval, seed)


def coverage(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """Return the share of balls of the reference that contain a sample."""
    x, y = _features(samples, reference)
    members = membership(x, y, radii(y, DENSITY_K))
    value = float(members.filled.double().mean())
    return _jackknife(value, members.only.double() / len(y), DENSITY_K, len(y), interval, seed)


def _features(samples: FeatureSet, reference: FeatureSet) -> tuple[Tensor, Tensor]:
    assert samples.kept is not None
    assert reference.kept is not None
    return samples.kept, reference.kept


def _mean(per_sample: Tensor, k: int, n_reference: int, interval: bool, seed: int) -> MetricValue:
    """Return a metric that is a mean over samples."""
    value, n = float(per_sample.mean()), len(per_sample)
    around = bootstrap(value, per_sample, n, seed=seed) if interval else None
    return MetricValue(value, around, {"k": k, "n": n, "n_reference": n_reference})


def _jackknife(value: float, loss: Tensor, k: int, n_reference: int, interval: bool, seed: int) -> MetricValue:
    """Return a metric that falls by `loss` (n,) when one sample is left out: n·loss is the sample's influence.

    The balls of the other samples stay as they are, which is exact for coverage and approximate for recall.
    """
    n = len(loss)
    around = bootstrap(value, n * loss, n, seed=seed) if interval else None
    return _as_share(MetricValue(value, around, {"k": k, "n": n, "n_reference": n_reference}))


def _as_share(result: MetricValue) -> MetricValue:
    """Cut the interval to [0, 1]."""
    around = result.interval
    cut = None if around is None else replace(around, low=max(0.0, around.low), high=min(1.0, around.high))
    return replace(result, interval=cut)
