"""Streaming moments of features, and a bounded random sample of the features themselves.

The Fréchet distance needs only the moments: 34 MB for 2048 features, whatever the number of images. KID and the
intervals need features, so at most `keep` of them are kept. An image's index alone decides whether it is kept, so
the choice does not depend on the batch size or on how processes share the images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scalelong.errors import EvaluationError, invalid

KEEP = 10_000  # features kept: 82 MB of Inception's


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and unbiased covariance (D, D) of n features in float64; n is None where a file does not record it."""

    n: int | None
    mean: Tensor
    covariance: Tensor

    @property
    def width(self) -> int:
        return self.mean.shape[0]

    def __post_init__(self) -> None:
        width = self.mean.shape[0]
        if self.mean.shape != (width,) or self.covariance.shape != (width, width):
            shapes = tuple(self.mean.shape), tuple(self.covariance.shape)
            raise invalid("mean and covariance", "of shapes (D,) and (D, D)", shapes)
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.covariance).all()):
            raise EvaluationError("mean or covariance contains NaN or infinity")


@dataclass(frozen=True)
class FeatureSet:
    """A set of images in feature space: its moments, and some or all of its features."""

    moments: Moments
    kept: Tensor | None = None  # float32 (k, D): a uniformly random subset, in random order
    ranks: Tensor | None = None  # (k,): the random numbers that selected it; needed to select further
    seed: int = 0  # of the ranks
    head: Tensor | None = None  # (classes, D): the extractor's classifier, for the Inception score
    text: Tensor | None = None  # (k, D): embeddings of the captions of the kept images, for the CLIP score


class FeatureAccumulator:
    """Streaming mean and scatter in float64, merged batch by batch (Chan, Golub & LeVeque, 1979).

    The scatter is taken around the running mean, never as Σxxᵀ − n·x̄x̄ᵀ. Nothing cancels, so the covariance of
    features far from zero is as accurate as that of centred ones.
    """

    def __init__(self, keep: int = KEEP, seed: int = 0) -> None:
        self.count = 0
        self.keep, self.seed = keep, seed
        self.mean = torch.empty(0)  # (D,) after the first batch
        self.scatter = torch.empty(0)  # (D, D): Σ (x − mean)(x − mean)ᵀ
        self._kept: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def update(self, features: Tensor, indices: Tensor | None = None) -> None:
        """Add (B, D) features. `indices` are the positions of the images in the whole set; default: consecutive."""
        features = features.detach().cpu()
        batch = features.double()
        if indices is None:
            indices = torch.arange(self.count, self.count + len(batch))
        bad = ~torch.isfinite(batch).all(dim=1)
        if bad.any():
            raise EvaluationError(f"the features of image {int(indices[bad][0])} contain NaN or infinity")
        if self.count and batch.shape[1] != self.mean.shape[0]:
            raise EvaluationError(f"expected features of width {self.mean.shape[0]}, got width {batch.shape[1]}")
        self._kept.append(features.float().clone())
        self._ranks.append(_ranks(indices, self.seed))
        if sum(map(len, self._kept)) >= self.keep + max(1024, self.keep // 10):
            self._trim()
        mean = batch.mean(dim=0)
        centred = batch - mean
        if not self.count:
            self.count, self.mean, self.scatter = len(batch), mean, centred.T @ centred
            return
        self.scatter.addmm_(centred.T, centred)
        # Move the mean to that of both parts; the scatter gains the distance between their means.
        shift, total = mean - self.mean, self.count + len(batch)
        self.scatter.addr_(shift, shift, alpha=self.count * len(batch) / total)
        self.mean = self.mean + shift * (len(batch) / total)
        self.count = total

    def all_reduce(self) -> None:
        """Give every process the statistics of all. They exchange sums, so no share is padded or counted twice."""
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        width = torch.tensor([self.mean.shape[0]], device=device)
        dist.all_reduce(width, op=dist.ReduceOp.MAX)
        if not self.count:  # a process without images takes part with zeros
            self.mean, self.scatter = (torch.zeros(*[int(width)] * k, dtype=torch.float64) for k in (1, 2))
        count = torch.tensor([float(self.count)], dtype=torch.float64, device=device)
        total = self.mean.to(device) * count
        dist.all_reduce(total)
        own_count = count.clone()
        dist.all_reduce(count)
        mean = total / count
        shift = self.mean.to(device) - mean
        scatter = self.scatter.to(device) + own_count * torch.outer(shift, shift)
        dist.all_reduce(scatter)
        self.count, self.mean, self.scatter = int(count), mean.cpu(), scatter.cpu()
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (self._kept, self._ranks))
        self._kept = [part for kept, _ in shares for part in kept]
        self._ranks = [part for _, ranks in shares for part in ranks]

    def result(self) -> FeatureSet:
        """Return the moments and the kept features."""
        if self.count < 2:
            raise EvaluationError(f"a covariance needs at least 2 images, got {self.count}")
        self._trim()
        moments = Moments(self.count, self.mean.clone(), self.scatter / (self.count - 1))
        return FeatureSet(moments, self._kept[0], self._ranks[0], self.seed)

    @classmethod
    def from_result(cls, features: FeatureSet, keep: int = KEEP) -> FeatureAccumulator:
        """Continue from a result."""
        self, moments = cls(keep, features.seed), features.moments
        if moments.n is None or features.kept is None or features.ranks is None:
            raise EvaluationError("cannot continue statistics that lack a count or kept features")
        self.count, self.mean, self.scatter = moments.n, moments.mean, moments.covariance * (moments.n - 1)
        self._kept, self._ranks = [features.kept], [features.ranks]
        return self

    def _trim(self) -> None:
        """Keep the features of lowest rank, ordered by rank."""
        ranks = torch.cat(self._ranks)
        order = ranks.argsort()[: self.keep]
        self._kept, self._ranks = [torch.cat(self._kept)[order]], [ranks[order]]


def kept_indices(n: int, seed: int, keep: int = KEEP) -> Tensor:
    """Return the indices of the kept ones of n images, in their order."""
    return _ranks(torch.arange(n), seed).argsort()[:keep]


def _ranks(indices: Tensor, seed: int) -> Tensor:
    """Return a pseudo-random 63-bit rank for each (index, seed), by SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = indices.numpy().astype(np.uint64) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(1)).astype(np.int64))
