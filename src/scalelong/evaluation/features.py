"""From images to the statistics of their features: one pass, bounded memory, any number of processes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.images import Batch, ImageStream, place
from scalelong.evaluation.statistics import FeatureAccumulator, FeatureSet
from scalelong.progress import track

BATCH = 50


@dataclass
class Progress:
    """Everything that a pass over images has gathered, at any time on its way."""

    accumulator: FeatureAccumulator
    content: int = 0  # Σ SHA-256 of the images, modulo 2²⁵⁶: the same for the same images in any order
    shape: tuple[int, ...] | None = None  # (h, w, c)
    seconds: float = 0.0

    def count_in(self, batch: Batch, features: Tensor) -> None:
        """Add a batch of images and their features."""
        self.accumulator.update(features, batch.indices)
        self.shape = tuple(batch.images.shape[1:])
        prefix = repr(self.shape).encode()
        for image in batch.images.cpu().contiguous().numpy():
            digest = hashlib.sha256(prefix + image.tobytes()).digest()
            self.content = (self.content + int.from_bytes(digest, "little")) % 2**256

    def so_far(self) -> Extracted:
        """The statistics of the images counted in until now."""
        assert self.shape is not None
        return Extracted(self.accumulator.result(), f"{self.content:064x}", self.shape, self.seconds)


@dataclass(frozen=True)
class Extracted:
    """The statistics of a set of images, and what identifies the set."""

    features: FeatureSet
    content: str  # hexadecimal
    shape: tuple[int, ...]  # (h, w, c)
    seconds: float


def extract(
    stream: ImageStream,
    extractor: FeatureExtractor,
    n: int | None = None,
    batch_size: int = BATCH,
    keep: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    checkpoint: Callable[[Progress], None] | None = None,
) -> Extracted:
    """The feature statistics of the first n images (all by default).

    In several processes each works on its own share, and all get the statistics of the whole, every image counted
    once. `progress` continues an earlier pass over the same images; `checkpoint` is called after every batch.
    """
    if n is not None and n < 2:
        raise ScaleLongError(f"n is {n}; a covariance needs at least 2 images")
    if n is not None and stream.length is not None and n > stream.length:
        raise ScaleLongError(f"{n:,} images were asked for and {stream.name} has {stream.length:,}")
    if batch_size < 1:
        raise ScaleLongError(f"batch_size is {batch_size}; it must be at least 1")
    options = {} if keep is None else {"keep": keep}
    progress = progress or Progress(FeatureAccumulator(seed=seed, **options))
    total = n if n is not None else stream.length
    left = None if total is None else total - progress.accumulator.count
    began = time.monotonic() - progress.seconds
    failure: ScaleLongError | None = None
    try:
        batches = stream.batches(batch_size, progress.accumulator.count, n)
        with torch.inference_mode():
            for batch in _tracked(batches, f"features of {stream.name}", left, batch_size):
                progress.count_in(batch, extractor(batch.images))
                progress.seconds = time.monotonic() - began
                if checkpoint is not None:
                    checkpoint(progress)
    except ScaleLongError as error:
        failure = error
    _agree(progress, failure)
    progress.accumulator.all_reduce()
    progress.seconds = time.monotonic() - began
    if n is not None and progress.accumulator.count != n:
        raise ScaleLongError(f"{n:,} images were asked for and {stream.name} gave {progress.accumulator.count:,}")
    if progress.shape is None:
        raise ScaleLongError(f"{stream.name} gave no images")
    return progress.so_far()


def _tracked(batches: Iterator[Batch], description: str, images: int | None, size: int) -> Iterator[Batch]:
    rank, world = place()
    if rank:
        return batches
    return track(batches, description, None if images is None else -(-images // (size * world)))


def _agree(progress: Progress, failure: ScaleLongError | None) -> None:
    """Raise what went wrong in any process in all of them, so that none waits; else join the images' identities."""
    _, world = place()
    if failure is not None and world == 1:
        raise failure
    if world == 1:
        return
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (progress.content, progress.shape, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, _, message) in enumerate(everyone):
        if message is not None:
            raise ScaleLongError(f"process {rank}: {message}")
    shapes = {shape for _, shape, _ in everyone if shape is not None}
    if len(shapes) > 1:
        raise ScaleLongError(f"the processes gave images of mixed sizes: {sorted(shapes)}")
    progress.content = sum(content for content, _, _ in everyone) % 2**256
    progress.shape = shapes.pop() if shapes else None
