"""Metrics by name: functions of the features of samples and reference, registered in `METRICS`.

To add a metric, write a function `(samples, reference, interval, seed) -> MetricValue` and register it here.
`evaluate_images` computes it in the same pass; evaluation.json, the command's table and the training log show it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import EvaluationError, invalid, unknown
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.statistics import FeatureSet, Moments

BLOCK = 1000  # features per KID subset, as in other tools; also the block size of the kernel matrix
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


@dataclass(frozen=True)
class Metric:
    """How to compute a metric, and when it applies."""

    label: str  # in tables; "{extractor}" is replaced by the extractor's name
    compute: Callable[[FeatureSet, FeatureSet, bool, int], MetricValue]
    applies: Callable[[FeatureExtractor], bool] = lambda extractor: True
    needs_features: bool = False  # of the reference, whose moments are enough otherwise
    least: int = 2  # images on each side
    higher_is_better: bool = False


def check_metrics(names: Collection[str] | None, n: int | None, *counts: int | None) -> None:
    """Raise for an unknown metric or too few images, before any features are computed.

    counts: the images of samples and reference, None where the number (or a feature for each) is not known.
    """
    for name in names or ():
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if names is not None and not names:
        raise invalid("metrics", "at least one name", list(names))
    if names is None:  # all that can be computed: with the moments of a reference alone, those that need no features
        names = [name for name, metric in METRICS.items() if counts[-1] is not None or not metric.needs_features]
    smallest = min((count for count in counts if count is not None), default=None)
    for name in names:
        least = METRICS[name].least
        if n is not None and n < least:
            raise invalid("n", f">= {least} for {name}", n)
        if smallest is not None and smallest < least:
            raise EvaluationError(f"{name} needs at least {least} images on each side, got {smallest}")


def select_metrics(
    names: Collection[str] | None, extractor: FeatureExtractor, samples: FeatureSet, reference: FeatureSet
) -> list[str]:
    """Return `names` after checking that they can be computed, or by default every metric that can be."""
    features = samples.kept is not None and reference.kept is not None
    possible = [n for n, m in METRICS.items() if m.applies(extractor) and (features or not m.needs_features)]
    if names is None:
        return possible
    for name in names:
        if name not in possible:
            source = "a reference with moments only" if METRICS[name].applies(extractor) else extractor.name
            raise EvaluationError(f"cannot compute {name!r} from {source}; possible: {', '.join(possible)}")
    return list(names)


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


@dataclass(frozen=True, eq=False)
class FrechetDistance:
    """d² = ‖μ₁ − μ₂‖² + tr Σ₁ + tr Σ₂ − 2 tr (Σ₁^½ Σ₂ Σ₁^½)^½ (Dowson & Landau, 1982), with its parts."""

    value: float
    mean_part: float
    covariance_part: float
    rank: int  # numerical rank of the first covariance
    rank_reference: int
    _first: Moments = field(repr=False)
    _second: Moments = field(repr=False)
    _map: Tensor = field(repr=False)  # (D, r): the transport map A = _map·_mapᵀ, with A Σ₁ A = Σ₂ on the range of Σ₁

    def influence(self, features: Tensor) -> Tensor:
        """(k, D) features of the first set → (k,): how d² moves as one more image like these is added.

        The Gâteaux derivative of d² towards a point mass at x, from ∂d²/∂μ₁ = 2(μ₁ − μ₂) and ∂d²/∂Σ₁ = I − A:
        ψ(x) = 2⟨μ₁ − μ₂, x − μ₁⟩ + (x − μ₁)ᵀ(I − A)(x − μ₁), minus its mean over the set.
        """
        centred = features.double() - self._first.mean  # (k, D)
        linear = 2 * centred @ (self._first.mean - self._second.mean)
        psi = linear + centred.square().sum(dim=1) - (centred @ self._map).square().sum(dim=1)
        return psi - psi.mean()


def frechet_distance(first: Moments, second: Moments) -> FrechetDistance:
    """Return d² between N(μ₁, Σ₁) and N(μ₂, Σ₂).

    With Σ = L·Lᵀ the trace of the square root is the nuclear norm of L₁ᵀL₂, whose singular values are accurate to
    1e-16 of the largest. `sqrtm` and the eigenvalues of the asymmetric product Σ₁Σ₂ take the root of eigenvalues
    known to 1e-16 of the largest *square*: an error of 1e-8 for each direction that a rank-deficient covariance
    lacks, and a complex result where the error is negative.
    """
    _check_widths(first.width, second.width)
    mean_part = float((first.mean - second.mean).square().sum())
    left, right = _factor(first.covariance), _factor(second.covariance)  # (D, r₁), (D, r₂)
    _, singular, v = torch.linalg.svd(left.T @ right, full_matrices=False)
    traces = float(first.covariance.trace() + second.covariance.trace())
    covariance_part = traces - 2 * float(singular.sum())
    # A = L₂ V Σ⁻¹ Vᵀ L₂ᵀ, on the directions that both covariances have.
    shared = singular > singular.max() * 1e-12 if len(singular) else singular > 0
    transport = (right @ v[shared].T) * singular[shared].rsqrt()
    value = max(0.0, mean_part + covariance_part)
    return FrechetDistance(value, mean_part, covariance_part, left.shape[1], right.shape[1], first, second, transport)


def _factor(covariance: Tensor) -> Tensor:
    """Return L (D, r) with L·Lᵀ = Σ, where r counts the eigenvalues above rounding."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    floor = values[-1].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    positive = values > floor
    return vectors[:, positive] * values[positive].sqrt()


def _frechet(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    distance = frechet_distance(samples.moments, reference.moments)
    n, n_reference, width = samples.moments.n, reference.moments.n, samples.moments.width
    assert n is not None
    around = None
    if interval and samples.kept is not None:
        around = bootstrap(distance.value, distance.influence(samples.kept), n, seed=seed)
    warned = []
    sides = (("images", n, distance.rank), ("reference images", n_reference, distance.rank_reference))
    for which, count, rank in sides:
        if count is not None and count <= width:
            few = f"{count:,} {which} are too few for {width:,} features: their covariance has rank {rank:,}"
            warned.append(f"{few}, and the distance reflects N more than the images")
    bias = f"the distance is biased upwards for finite N: compare it only with values at N = {n:,}"
    # The distance of N copies of one image whose features are the reference's mean: μ₁ = μ₂ and Σ₁ = 0.
    constant = float(reference.moments.covariance.trace())
    notes = [bias]
    if distance.value > constant:
        notes.append(
            f"one constant image would be nearer to the reference ({constant:.4g}): these are not images of it"
        )
    details: dict[str, float] = {
        "rank": distance.rank, "rank_reference": distance.rank_reference, "constant": constant,
    }  # fmt: skip
    return MetricValue(distance.value, around, details, notes=tuple(notes), warnings=tuple(warned))


@dataclass(frozen=True)
class KernelDistance:
    """KID over all pairs, its spread over disjoint subsets, and the influence of each image."""

    value: float
    spread: float  # standard deviation of KID over the subsets
    subsets: int
    subset_size: int
    influence: Tensor  # (m,), centred: KID is, to first order, a mean of these


def kernel_distance(features: Tensor, reference: Tensor, subset_size: int | None = None) -> KernelDistance:
    """Return KID between (m, D) features and (n, D) reference features, in float64.

    KID (Bińkowski et al., 2018) is the squared MMD under the kernel k(x, y) = (⟨x, y⟩/D + 1)³. This estimate uses
    every pair of different images: the unbiased estimate of minimum variance. Other tools average over random
    subsets of 1000, with the same expectation. The spread is over disjoint subsets: by default of 1000, or ten of
    them below 10,000 features. An unbiased estimate may be negative.
    """
    _check_widths(features.shape[1], reference.shape[1])
    smaller = min(len(features), len(reference))
    if smaller < 4:
        raise EvaluationError(f"KID needs at least 4 images on each side, got {smaller}")
    size = subset_size or max(2, min(BLOCK, smaller // 10))
    if not 2 <= size <= smaller:
        raise invalid("subset_size", f"from 2 to {smaller}, the number of features", size)
    subsets = smaller // size
    within, across = _row_sums(features, features), _row_sums(features, reference)
    within_reference = _row_sums(reference, reference)
    m, n = len(features), len(reference)
    value = float(within.sum() / (m * (m - 1)) + within_reference.sum() / (n * (n - 1)) - 2 * across.sum() / (m * n))
    starts = range(0, subsets * size, size)
    subset_values = np.array([_kid(features[k : k + size], reference[k : k + size]) for k in starts])
    influence = 2 * (within / (m - 1) - across / n)
    spread = float(subset_values.std(ddof=1)) if subsets > 1 else float("nan")
    return KernelDistance(value, spread, subsets, size, influence - influence.mean())


def _kid(x: Tensor, y: Tensor) -> float:
    """Return KID between two sets of the same size."""
    size = len(x)
    within = _row_sums(x, x).sum() + _row_sums(y, y).sum()
    return float(within / (size * (size - 1)) - 2 * _row_sums(x, y).sum() / size**2)


def _row_sums(x: Tensor, y: Tensor) -> Tensor:
    """(m,): Σ_j k(x_i, y_j), without j = i where x is y. Works in blocks, so the (m, n) matrix is never stored."""
    same = x is y
    rows = torch.zeros(len(x), dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        left = x[i : i + BLOCK].double()
        for j in range(i if same else 0, len(y), BLOCK):
            kernel = (left @ y[j : j + BLOCK].double().T).div_(x.shape[1]).add_(1).pow_(3)
            if same and i == j:
                kernel.fill_diagonal_(0)
            rows[i : i + BLOCK] += kernel.sum(dim=1)
            if same and i != j:  # the kernel is symmetric: this is also the block below the diagonal
                rows[j : j + BLOCK] += kernel.sum(dim=0)
    return rows


def _kernel(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    assert samples.kept is not None
    assert reference.kept is not None
    kid = kernel_distance(samples.kept, reference.kept)
    n = len(samples.kept)
    around = bootstrap(kid.value, kid.influence, n, seed=seed) if interval else None
    details: dict[str, float] = {"n": n, "subsets": kid.subsets, "subset_size": kid.subset_size}
    return MetricValue(kid.value, around, {**details, "spread": kid.spread} if kid.subsets > 1 else details)


def _check_widths(first: int, second: int) -> None:
    if first != second:
        raise EvaluationError(f"features must have the same width on both sides, got {first} and {second}")


METRICS: dict[str, Metric] = {
    "fid": Metric("FID", _frechet, applies=lambda extractor: extractor.is_fid),
    "frechet": Metric("Fréchet distance of {extractor} (not FID)", _frechet, applies=lambda e: not e.is_fid),
    "kid": Metric("KID", _kernel, needs_features=True, least=4),
}
