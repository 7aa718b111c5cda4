"""The Fréchet distance of two Gaussians, exact to rounding for covariances of any rank: FID and its relatives."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalelong.evaluation.statistics import FeatureSet, Moments
from scalelong.evaluation.values import MetricValue, bootstrap, check_widths


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
    check_widths(first.width, second.width)
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


def frechet(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
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
