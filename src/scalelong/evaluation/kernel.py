"""KID (Bińkowski et al., 2018): the unbiased squared MMD under the kernel k(x, y) = (⟨x, y⟩/D + 1)³."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError

BLOCK = 1000  # features of a subset, as everywhere; also what is worked on at a time


@dataclass(frozen=True)
class KernelDistance:
    """KID over all pairs, its spread over disjoint subsets, and each image's influence on it."""

    value: float
    spread: float  # standard deviation of KID over the subsets
    subsets: int
    subset_size: int
    influence: Tensor  # (m,): KID is, to first order, a mean of these (their own mean taken off)


def kernel_distance(features: Tensor, reference: Tensor, subset_size: int | None = None) -> KernelDistance:
    """KID between (m, D) features and (n, D) features of the reference, in float64.

    The estimate uses every pair of different images, the minimum-variance unbiased one; KID by other tools, a mean
    over random subsets of 1000, has the same expectation. The spread is over disjoint subsets: by default as many
    of 1000 as there are, or ten if there are fewer than 10,000 features. Unbiased means that it may be negative.
    """
    if features.shape[1] != reference.shape[1]:
        raise ScaleLongError(f"features of widths {features.shape[1]} and {reference.shape[1]} cannot be compared")
    smaller = min(len(features), len(reference))
    if smaller < 4:
        raise ScaleLongError(f"KID with a spread needs at least 4 images on each side, got {smaller}")
    size = subset_size or max(2, min(BLOCK, smaller // 10))
    subsets = smaller // size
    if size < 2 or subsets < 1:
        raise ScaleLongError(f"subset_size is {size}; it must be from 2 to {smaller}, the number of features")
    within = _sums(features, features, size)
    across = _sums(features, reference, size)
    beside = _sums(reference, reference, size)
    m, n = len(features), len(reference)
    value = float(within.rows.sum() / (m * (m - 1)) + beside.rows.sum() / (n * (n - 1)))
    value -= 2 * float(across.rows.sum() / (m * n))
    pairs = size * (size - 1)
    of_subsets = (within.blocks[:subsets] + beside.blocks[:subsets]) / pairs - 2 * across.blocks[:subsets] / size**2
    influence = 2 * (within.rows / (m - 1) - across.rows / n)
    spread = float(of_subsets.std()) if subsets > 1 else float("nan")
    return KernelDistance(value, spread, subsets, size, influence - influence.mean())


@dataclass(frozen=True)
class _Sums:
    rows: Tensor  # (m,): Σ_j k(x_i, y_j), without j = i where both are the same set
    blocks: Tensor  # Σ k over the pairs of subset b of x with subset b of y


def _sums(x: Tensor, y: Tensor, size: int) -> _Sums:
    """Sums of the kernel by blocks, so that no (m, n) matrix is ever held."""
    same = x is y
    rows = torch.zeros(len(x), dtype=torch.float64)
    blocks = torch.zeros(min(len(x), len(y)) // size, dtype=torch.float64)
    for i, start in enumerate(range(0, len(x), size)):
        left = x[start : start + size].double()
        for j, begin in enumerate(range(0, len(y), size)):
            if same and j < i:
                continue
            right = left if same and i == j else y[begin : begin + size].double()
            kernel = (left @ right.T).div_(x.shape[1]).add_(1).pow_(3)
            if same and i == j:
                kernel.fill_diagonal_(0)
            sums = kernel.sum(dim=1)
            rows[start : start + size] += sums
            if same and i != j:
                rows[begin : begin + size] += kernel.sum(dim=0)
            if i == j and i < len(blocks):
                blocks[i] = sums.sum()
    return _Sums(rows, blocks)
