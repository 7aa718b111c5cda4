"""KID (Bińkowski et al., 2018): the unbiased squared MMD under the kernel k(x, y) = (⟨x, y⟩/D + 1)³."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    within, across, beside = (
        _row_sums(features, features),
        _row_sums(features, reference),
        _row_sums(reference, reference),
    )
    m, n = len(features), len(reference)
    value = float(within.sum() / (m * (m - 1)) + beside.sum() / (n * (n - 1)) - 2 * across.sum() / (m * n))
    starts = range(0, subsets * size, size)
    of_subsets = np.array([_kid(features[at : at + size], reference[at : at + size]) for at in starts])
    influence = 2 * (within / (m - 1) - across / n)
    spread = float(of_subsets.std(ddof=1)) if subsets > 1 else float("nan")
    return KernelDistance(value, spread, subsets, size, influence - influence.mean())


def _kid(x: Tensor, y: Tensor) -> float:
    """KID between two sets of one size."""
    size = len(x)
    within = _row_sums(x, x).sum() + _row_sums(y, y).sum()
    return float(within / (size * (size - 1)) - 2 * _row_sums(x, y).sum() / size**2)


def _row_sums(x: Tensor, y: Tensor) -> Tensor:
    """(m,): Σ_j k(x_i, y_j), without j = i where x is y; by blocks, so that no (m, n) matrix is ever held."""
    same = x is y
    rows = torch.zeros(len(x), dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        left = x[i : i + BLOCK].double()
        for j in range(i if same else 0, len(y), BLOCK):
            kernel = (left @ y[j : j + BLOCK].double().T).div_(x.shape[1]).add_(1).pow_(3)
            if same and i == j:
                kernel.fill_diagonal_(0)
            rows[i : i + BLOCK] += kernel.sum(dim=1)
            if same and i != j:  # the kernel is symmetric: the block below the diagonal is this one
                rows[j : j + BLOCK] += kernel.sum(dim=0)
    return rows
