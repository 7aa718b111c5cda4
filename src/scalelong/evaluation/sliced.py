"""MIND, the Monge–Inception distance (Berthet et al., 2026): sliced Wasserstein-2 of features."""

from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.errors import invalid
from scalelong.evaluation.statistics import FeatureSet
from scalelong.evaluation.values import MetricValue, bootstrap, check_widths

PROJECTIONS = 1000
BLOCK = 100  # projections at a time


@dataclass(frozen=True)
class SlicedDistance:
    """3·D times the mean of W₂² over random directions, and the influence of each image."""

    value: float
    influence: Tensor  # (n,), centred


def sliced_distance(
    features: Tensor, reference: Tensor, projections: int = PROJECTIONS, seed: int = 0
) -> SlicedDistance:
    """Return MIND between (m, D) features and (n, D) reference features; the larger set is cut to the smaller.

    In one dimension optimal transport pairs sorted values, so W₂² is a mean of squared differences. Its derivative
    towards a point mass at x is the Kantorovich potential φ(x) with φ′(x) = 2(x − T(x)), where T is the transport.
    """
    check_widths(features.shape[1], reference.shape[1])
    if projections < 1:
        raise invalid("projections", "an integer >= 1", projections)
    n, width = min(len(features), len(reference)), features.shape[1]
    x, y = features[:n].float(), reference[:n].float()  # kept features are in random order
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(projections, width, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    total, influence = 0.0, torch.zeros(n, dtype=torch.float64)
    for part in directions.split(BLOCK):
        along, order = (x @ part.T).double().sort(dim=0)  # (n, b)
        gap = along - (y @ part.T).double().sort(dim=0).values
        total += float(gap.square().mean(dim=0).sum())
        # φ by the trapezoidal rule over the sorted values.
        steps = along.diff(dim=0) * (gap[1:] + gap[:-1])
        potential = torch.cat([torch.zeros_like(gap[:1]), steps.cumsum(dim=0)])
        influence += torch.empty_like(potential).scatter_(0, order, potential).sum(dim=1)
    scale = 3 * width / projections
    return SlicedDistance(scale * total, scale * (influence - influence.mean()))


def mind(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """3·D times the mean of W₂² over 1,000 random directions, which do not depend on the seed of the samples."""
    assert samples.kept is not None
    assert reference.kept is not None
    distance = sliced_distance(samples.kept, reference.kept)
    n = len(distance.influence)
    around = bootstrap(distance.value, distance.influence, n, seed=seed) if interval else None
    note = f"MIND is biased upwards for finite N: compare it only with values at N = {n:,}"
    return MetricValue(distance.value, around, {"n": n, "projections": PROJECTIONS}, notes=(note,))
