"""Image sources: anything that holds images, as a stream of checked batches.

A batch is a pair: uint8 images (B, H, W, C), and the index of each in the whole set.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scalelong.data.images import SUFFIXES, read_header, read_image
from scalelong.data.records import Options
from scalelong.errors import DataError, EvaluationError, invalid

Batch = tuple[Tensor, Tensor]


class ArrayImages:
    """Images in one array or memory map, (n, H, W, C)."""

    def __init__(self, array: np.ndarray | Tensor, name: str = "array") -> None:
        self.name, self.length, self._array = name, len(array), array
        if array.ndim != 4:
            raise EvaluationError(f"{name} must have shape (n, h, w, c), got {tuple(array.shape)}")

    def batches(self, size: int, start: int, stop: int | None, share: tuple[int, int] | None = None) -> Iterator[Batch]:
        """Yield images start … stop − 1: of the share (rank, world), by default this process's."""
        rank, world = share or rank_and_world()
        stop = stop or self.length
        for first in range(start + rank * size, stop, world * size):  # processes take batches in turn
            last = min(first + size, stop)
            yield check_batch(self._read(first, last), self.name), torch.arange(first, last)

    def _read(self, first: int, last: int) -> np.ndarray | Tensor:
        return self._array[first:last]


class FolderImages(ArrayImages):
    """The image files of a folder and its subfolders, sorted by path. All must have the same size."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.name = self.folder.name or str(self.folder)
        if not self.folder.is_dir():
            raise DataError(f"{folder} is not a folder")
        self.files = sorted(path for path in self.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not self.files:
            raise DataError(f"{folder} contains no images; expected files ending in {', '.join(sorted(SUFFIXES))}")
        self.length = len(self.files)
        headers = map(read_header, self.files)
        self.channels = 1 if all(header is not None and header.grey for header in headers) else 3
        self._shape: tuple[int, ...] | None = None  # of the first image

    def _read(self, first: int, last: int) -> np.ndarray:
        files, options = self.files[first:last], Options(channels=self.channels)
        with ThreadPoolExecutor() as pool:  # Pillow decodes without the GIL
            images = list(pool.map(lambda file: read_image(file, str(file), options), files))
        self._shape = self._shape or images[0].shape
        for file, image in zip(files, images, strict=True):
            _check_size(str(file), image.shape, self._shape)
        return np.stack(images)


class StreamImages:
    """Batches from any iterable, such as a sampler. Each process provides its own share of the images."""

    length = None  # unknown

    def __init__(self, batches: Iterable[Any], name: str = "stream") -> None:
        self.name, self._batches = name, batches

    def batches(self, size: int, start: int, stop: int | None, share: tuple[int, int] | None = None) -> Iterator[Batch]:
        """Yield up to `stop` images of all processes. `size` and `start` have no effect."""
        rank, world = share or rank_and_world()
        wanted = None if stop is None else len(range(rank, stop, world))  # of this process
        seen, shape = 0, None
        for batch in self._batches:
            images = check_batch(batch, self.name)
            shape = shape or images.shape[1:]
            _check_size(self.name, images.shape[1:], shape)
            images = images if wanted is None else images[: wanted - seen]
            if len(images):
                yield images, (torch.arange(len(images)) + seen) * world + rank
            seen += len(images)
            if seen == wanted:
                return


ImageStream = ArrayImages | StreamImages


def image_stream(images: Any, name: str | None = None) -> ImageStream:
    """Return a stream of a folder, an array (n, H, W, C), an object with such `.images`, or an iterable of batches."""
    if isinstance(images, ImageStream):
        return images
    if isinstance(images, (str, Path)):
        return FolderImages(images)
    if isinstance(images, (np.ndarray, Tensor)):
        return ArrayImages(images, name or "array")
    if hasattr(images, "images"):
        return ArrayImages(images.images, name or str(getattr(images, "name", type(images).__name__)))
    if isinstance(images, Iterable):
        return StreamImages(images, name or "stream")
    raise invalid("images", "a folder, an array or batches of uint8 images", type(images).__name__)


def channels_of(source: Any) -> int | None:
    """Return the channels of images that are already at hand, None for a stream."""
    shape: Any = getattr(getattr(source, "images", source), "shape", None)
    return getattr(source, "channels", shape[-1] if shape else None)


def check_batch(batch: Any, name: str) -> Tensor:
    """Return the batch as a uint8 tensor (B, H, W, C), or raise an error that says what is wrong with it."""
    images = torch.from_numpy(np.array(batch)) if isinstance(batch, np.ndarray) else batch
    if not isinstance(images, Tensor):
        raise EvaluationError(f"{name}: expected a batch of images, got {type(batch).__name__}")
    if images.dtype != torch.uint8:
        latents = images.ndim == 4 and 4 in (images.shape[1], images.shape[-1])
        hint = "; scalelong.data.decode_latents decodes latents" if latents else ""
        hint += "; scalelong.evaluation.to_uint8 converts samples in [−1, 1]" if images.is_floating_point() else ""
        raise EvaluationError(f"{name}: expected uint8 images, got {images.dtype} {tuple(images.shape)}{hint}")
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise EvaluationError(f"{name}: expected shape (b, h, w, 1 or 3), got {tuple(images.shape)}")
    return images


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _check_size(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        got, first = (f"{s[1]}×{s[0]}" + ("" if s[2] == 3 else " grey") for s in (shape, expected))
        raise EvaluationError(f"{name} has an image of {got} after images of {first}; resize all to one size first")
