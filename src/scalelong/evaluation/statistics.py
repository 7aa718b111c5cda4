"""Moments of features as they stream by, and a bounded random sample of the features themselves.

FID needs only the moments: 34 MB for 2048 features, whatever the number of images. KID and the intervals need
features, so at most `keep` of them are kept, chosen at random by the image's index alone: the choice does not
depend on the batch size or on how the images were shared out among processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scalelong.errors import ScaleLongError

KEEP = 10_000  # features kept: 82 MB of Inception's


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and unbiased covariance (D, D) of n features, float64. n is None where a file does not tell."""

    n: int | None
    mean: Tensor
    covariance: Tensor

    @property
    def width(self) -> int:
        return self.mean.shape[0]

    def __post_init__(self) -> None:
        width = self.mean.shape[0]
        if self.mean.shape != (width,) or self.covariance.shape != (width, width):
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.covariance.shape)}"
            raise ScaleLongError(f"mean and covariance must be of shapes (D,) and (D, D), got {shapes}")
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.covariance).all()):
            raise ScaleLongError("mean or covariance holds NaN or infinity")


@dataclass(frozen=True)
class FeatureSet:
    """What is known about a set of images in feature space: its moments, and some or all of its features."""

    moments: Moments
    kept: Tensor | None = None  # float32 (k, D), a uniformly random subset in random order
    ranks: Tensor | None = None  # (k,): the random numbers that chose it, to choose further

    @property
    def n(self) -> int | None:
        return self.moments.n


class FeatureAccumulator:
    """Streaming mean and scatter in float64, merged batch by batch (Chan, Golub & LeVeque, 1979).

    The scatter is taken around the running mean, never as Σxxᵀ − n·x̄x̄ᵀ: nothing cancels, so the covariance of
    features far from zero is as good as that of centred ones.
    """

    def __init__(self, keep: int = KEEP, seed: int = 0) -> None:
        self.count = 0
        self.keep, self.seed = keep, seed
        self.mean = torch.empty(0)  # (D,) from the first batch on
        self.scatter = torch.empty(0)  # (D, D): Σ (x − mean)(x − mean)ᵀ
        self._kept: list[Tensor] = []
        self._ranks: list[Tensor] = []

    def update(self, features: Tensor, indices: Tensor | None = None) -> None:
        """Count (B, D) features in. `indices` are the images' places in the whole set, by default in order."""
        features = features.detach().cpu()
        batch = features.double()
        if indices is None:
            indices = torch.arange(self.count, self.count + len(batch))
        bad = ~torch.isfinite(batch).all(dim=1)
        if bad.any():
            raise ScaleLongError(f"the features of image {int(indices[bad][0])} hold NaN or infinity")
        if self.count and batch.shape[1] != self.mean.shape[0]:
            raise ScaleLongError(f"features of width {batch.shape[1]} after features of width {self.mean.shape[0]}")
        self._keep(features.float(), indices)
        mean = batch.mean(dim=0)
        centred = batch - mean
        if not self.count:
            self.count, self.mean, self.scatter = len(batch), mean, centred.T @ centred
            return
        self.scatter.addmm_(centred.T, centred)
        self._shift(len(batch), mean)

    def merge(self, other: FeatureAccumulator) -> None:
        """Count in what another accumulator has seen."""
        if not other.count:
            return
        if not self.count:
            self.count, self.mean, self.scatter = other.count, other.mean.clone(), other.scatter.clone()
        else:
            self.scatter += other.scatter
            self._shift(other.count, other.mean)
        self._kept += other._kept
        self._ranks += other._ranks
        self._trim()

    def all_reduce(self) -> None:
        """Make every process hold the statistics of all processes, each image counted once.

        Sums are exchanged, not samples: no process pads its share, so no image is counted twice.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        width = torch.tensor([self.mean.shape[0]], device=device)
        dist.all_reduce(width, op=dist.ReduceOp.MAX)
        if not self.count:  # a process without images takes part with zeros
            self.mean, self.scatter = (torch.zeros(*[int(width)] * k, dtype=torch.float64) for k in (1, 2))
        count = torch.tensor([float(self.count)], dtype=torch.float64, device=device)
        total = self.mean.to(device) * count
        dist.all_reduce(total)
        here = count.clone()
        dist.all_reduce(count)
        mean = total / count
        apart = self.mean.to(device) - mean
        scatter = self.scatter.to(device) + here * torch.outer(apart, apart)
        dist.all_reduce(scatter)
        self.count, self.mean, self.scatter = int(count), mean.cpu(), scatter.cpu()
        self._kept, self._ranks = _gather(self._features(), self._order(), device, int(width))
        self._trim()

    def result(self) -> FeatureSet:
        """The moments and kept features of what was counted in."""
        if self.count < 2:
            raise ScaleLongError(f"a covariance needs at least 2 images, got {self.count}")
        self._trim()
        moments = Moments(self.count, self.mean.clone(), self.scatter / (self.count - 1))
        return FeatureSet(moments, self._features(), self._order()) if self.keep else FeatureSet(moments)

    @classmethod
    def from_result(cls, features: FeatureSet, keep: int = KEEP, seed: int = 0) -> FeatureAccumulator:
        """An accumulator that goes on from a result."""
        self = cls(keep, seed)
        moments, kept, ranks = features.moments, features.kept, features.ranks
        if moments.n is None or kept is None or ranks is None:
            raise ScaleLongError("statistics without a count and kept features cannot be continued")
        self.count, self.mean, self.scatter = moments.n, moments.mean, moments.covariance * (moments.n - 1)
        self._kept, self._ranks = [kept], [ranks]
        return self

    def _shift(self, count: int, mean: Tensor) -> None:
        """Move the mean to that of both parts; the scatter gains what lies between their means."""
        apart, total = mean - self.mean, self.count + count
        self.scatter.addr_(apart, apart, alpha=self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total

    def _keep(self, features: Tensor, indices: Tensor) -> None:
        if not self.keep:
            return
        self._kept.append(features.clone())
        self._ranks.append(_ranks(indices, self.seed))
        if sum(map(len, self._kept)) >= self.keep + max(1024, self.keep // 10):
            self._trim()

    def _trim(self) -> None:
        """Keep the features of lowest rank, in the order of their ranks."""
        if not self._kept:
            return
        ranks = torch.cat(self._ranks)
        order = ranks.argsort()[: self.keep]
        self._kept, self._ranks = [torch.cat(self._kept)[order]], [ranks[order]]

    def _features(self) -> Tensor:
        return torch.cat(self._kept) if self._kept else torch.empty(0, self.mean.shape[0])

    def _order(self) -> Tensor:
        return torch.cat(self._ranks) if self._ranks else torch.empty(0, dtype=torch.int64)


def _ranks(indices: Tensor, seed: int) -> Tensor:
    """A pseudo-random 63-bit rank of each index, by SplitMix64 (Steele et al., 2014): a function of index and seed."""
    with np.errstate(over="ignore"):
        z = indices.numpy().astype(np.uint64) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(1)).astype(np.int64))


def _gather(features: Tensor, ranks: Tensor, device: torch.device, width: int) -> tuple[list[Tensor], list[Tensor]]:
    """The kept features of all processes, which may hold different numbers of them."""
    size = torch.tensor([len(ranks)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, width, dtype=torch.float32, device=device)
    padded[: len(ranks)] = features.to(device)
    order = torch.zeros(longest, dtype=torch.int64, device=device)
    order[: len(ranks)] = ranks.to(device)
    all_features = [torch.empty_like(padded) for _ in sizes]
    all_ranks = [torch.empty_like(order) for _ in sizes]
    dist.all_gather(all_features, padded)
    dist.all_gather(all_ranks, order)
    return (
        [part[: int(s)].cpu() for part, s in zip(all_features, sizes, strict=True)],
        [part[: int(s)].cpu() for part, s in zip(all_ranks, sizes, strict=True)],
    )
