"""The Fréchet distance between Gaussians, in float64, by a square root that missing rank does not harm."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.evaluation.statistics import Moments


@dataclass(frozen=True, eq=False)
class FrechetDistance:
    """d² = ‖μ₁ − μ₂‖² + tr Σ₁ + tr Σ₂ − 2 tr (Σ₁^½ Σ₂ Σ₁^½)^½ (Dowson & Landau, 1982), and what it was made of."""

    value: float
    mean_part: float
    covariance_part: float
    rank: int  # of the first covariance, numerically
    rank_reference: int
    _first: Moments = field(repr=False)
    _second: Moments = field(repr=False)
    _map: Tensor = field(repr=False)  # (D, r): the transport map A = _map·_mapᵀ, with A Σ₁ A = Σ₂ on the range of Σ₁

    def influence(self, features: Tensor) -> Tensor:
        """(k, D) features of the first set → (k,): how d² moves as one more image like these is counted in.

        The Gâteaux derivative of d² towards a point mass at x, from ∂d²/∂μ₁ = 2(μ₁ − μ₂) and ∂d²/∂Σ₁ = I − A:
        ψ(x) = 2⟨μ₁ − μ₂, x − μ₁⟩ + (x − μ₁)ᵀ(I − A)(x − μ₁), less its mean over the set. d² is, to first order,
        a mean over images of ψ.
        """
        centred = features.double() - self._first.mean  # (k, D)
        linear = 2 * centred @ (self._first.mean - self._second.mean)
        psi = linear + centred.square().sum(dim=1) - (centred @ self._map).square().sum(dim=1)
        return psi - psi.mean()


def frechet_distance(first: Moments, second: Moments) -> FrechetDistance:
    """d² between N(μ₁, Σ₁) and N(μ₂, Σ₂).

    With Σ = L·Lᵀ the trace of the square root is the nuclear norm of L₁ᵀL₂. Its singular values come out to 1e-16
    of the largest. The usual ways, `sqrtm` or the eigenvalues of the asymmetric product Σ₁Σ₂, take the root of
    eigenvalues known to 1e-16 of the largest *square*, which is 1e-8 for each direction that a rank-deficient
    covariance lacks, complex where the error is negative.
    """
    if first.width != second.width:
        raise ScaleLongError(f"features of widths {first.width} and {second.width} cannot be compared")
    mean_part = float((first.mean - second.mean).square().sum())
    left, right = _factor(first.covariance), _factor(second.covariance)  # (D, r₁), (D, r₂)
    _, singular, v = torch.linalg.svd(left.T @ right, full_matrices=False)
    traces = float(first.covariance.trace() + second.covariance.trace())
    covariance_part = traces - 2 * float(singular.sum())
    # A = L₂ V Σ⁻¹ Vᵀ L₂ᵀ, on the directions that both covariances have.
    there = singular > singular.max() * 1e-12 if len(singular) else singular > 0
    transport = (right @ v[there].T) * singular[there].rsqrt()
    return FrechetDistance(
        value=max(0.0, mean_part + covariance_part),
        mean_part=mean_part,
        covariance_part=covariance_part,
        rank=left.shape[1],
        rank_reference=right.shape[1],
        _first=first,
        _second=second,
        _map=transport,
    )


def _factor(covariance: Tensor) -> Tensor:
    """L (D, r) with L·Lᵀ = Σ, where r counts the eigenvalues that stand above rounding."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    floor = values[-1].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    there = values > floor
    return vectors[:, there] * values[there].sqrt()
