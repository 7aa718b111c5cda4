"""Squared MMD over all pairs: KID's cubic kernel on any features, and CMMD's Gaussian kernel on CLIP's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import EvaluationError, invalid
from scalelong.evaluation.statistics import FeatureSet
from scalelong.evaluation.values import MetricValue, bootstrap, check_widths

BLOCK = 1000  # features per KID subset, as in other tools; also the block size of the kernel matrix
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0  # of Jayasumana et al. (2024)
Kernel = Callable[[Tensor, int], Tensor]  # of the inner products (a, b) and the width of the features, in place


@dataclass(frozen=True)
class KernelDistance:
    """KID over all pairs, its spread over disjoint subsets, and the influence of each image."""

    value: float
    spread: float  # standard deviation of KID over the subsets
    subsets: int
    subset_size: int
    with_diagonal: float  # the estimate that counts pairs of an image with itself: biased upwards, never negative
    influence: Tensor  # (m,), centred: KID is, to first order, a mean of these


def cubic(products: Tensor, width: int) -> Tensor:
    """KID's kernel k(x, y) = (⟨x, y⟩/D + 1)³."""
    return products.div_(width).add_(1).pow_(3)


def gaussian(products: Tensor, width: int) -> Tensor:
    """CMMD's kernel exp(−‖x − y‖²/2σ²), for features of length one."""
    return products.sub_(1).div_(CMMD_SIGMA**2).exp_()


def kernel_distance(
    features: Tensor, reference: Tensor, subset_size: int | None = None, kernel: Kernel = cubic
) -> KernelDistance:
    """Return the squared MMD between (m, D) features and (n, D) reference features, in float64: KID by default.

    KID (Bińkowski et al., 2018) is the squared MMD under the kernel k(x, y) = (⟨x, y⟩/D + 1)³. This estimate uses
    every pair of different images: the unbiased estimate of minimum variance. Other tools average over random
    subsets of 1000, with the same expectation. The spread is over disjoint subsets: by default of 1000, or ten of
    them below 10,000 features. An unbiased estimate may be negative.
    """
    check_widths(features.shape[1], reference.shape[1])
    smaller = min(len(features), len(reference))
    if smaller < 4:
        raise EvaluationError(f"KID needs at least 4 images on each side, got {smaller}")
    size = subset_size or max(2, min(BLOCK, smaller // 10))
    if not 2 <= size <= smaller:
        raise invalid("subset_size", f"from 2 to {smaller}, the number of features", size)
    subsets = smaller // size
    within, within_reference = (_row_sums(side, side, kernel, within=True) for side in (features, reference))
    across = _row_sums(features, reference, kernel)
    m, n = len(features), len(reference)
    value = float(within.sum() / (m * (m - 1)) + within_reference.sum() / (n * (n - 1)) - 2 * across.sum() / (m * n))
    diagonals = (_diagonal(side, kernel) for side in (features, reference))
    sums = (within.sum() + next(diagonals)) / m**2 + (within_reference.sum() + next(diagonals)) / n**2
    with_diagonal = float(sums - 2 * across.sum() / (m * n))
    starts = range(0, subsets * size, size)
    subset_values = np.array([_mmd(features[k : k + size], reference[k : k + size], kernel) for k in starts])
    influence = 2 * (within / (m - 1) - across / n)
    spread = float(subset_values.std(ddof=1)) if subsets > 1 else float("nan")
    return KernelDistance(value, spread, subsets, size, with_diagonal, influence - influence.mean())


def _mmd(x: Tensor, y: Tensor, kernel: Kernel) -> float:
    """Return the squared MMD between two sets of the same size."""
    size = len(x)
    within = _row_sums(x, x, kernel, within=True).sum() + _row_sums(y, y, kernel, within=True).sum()
    return float(within / (size * (size - 1)) - 2 * _row_sums(x, y, kernel).sum() / size**2)


def _row_sums(x: Tensor, y: Tensor, kernel: Kernel, within: bool = False) -> Tensor:
    """(m,): Σ_j k(x_i, y_j); `within` one set, without j = i. In blocks, so the (m, n) matrix is never stored."""
    rows = torch.zeros(len(x), dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        left = x[i : i + BLOCK].double()
        for j in range(i if within else 0, len(y), BLOCK):
            values = kernel(left @ y[j : j + BLOCK].double().T, x.shape[1])
            if within and i == j:
                values.fill_diagonal_(0)
            rows[i : i + BLOCK] += values.sum(dim=1)
            if within and i != j:  # the kernel is symmetric: this is also the block below the diagonal
                rows[j : j + BLOCK] += values.sum(dim=0)
    return rows


def _diagonal(x: Tensor, kernel: Kernel) -> Tensor:
    """Σ_i k(x_i, x_i)."""
    return kernel(x.double().square().sum(dim=1), x.shape[1]).sum()


def kid(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    assert samples.kept is not None
    assert reference.kept is not None
    mmd = kernel_distance(samples.kept, reference.kept)
    n = len(samples.kept)
    around = bootstrap(mmd.value, mmd.influence, n, seed=seed) if interval else None
    details: dict[str, float] = {"n": n, "subsets": mmd.subsets, "subset_size": mmd.subset_size}
    return MetricValue(mmd.value, around, {**details, "spread": mmd.spread} if mmd.subsets > 1 else details)


def cmmd(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """1000 · MMD² of CLIP embeddings of length one, σ = 10 (Jayasumana et al., 2024), as their code estimates it.

    Their estimate counts pairs of an image with itself; `details` has the unbiased one.
    """
    assert samples.kept is not None
    assert reference.kept is not None
    mmd = kernel_distance(samples.kept, reference.kept, kernel=gaussian)
    value, n = CMMD_SCALE * mmd.with_diagonal, len(samples.kept)
    around = bootstrap(value, CMMD_SCALE * mmd.influence, n, seed=seed) if interval else None
    return MetricValue(value, around, {"n": n, "n_reference": len(reference.kept), "unbiased": CMMD_SCALE * mmd.value})
