"""Whatever holds images, as a stream of checked uint8 batches with each image's place in the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scalelong.errors import ScaleLongError


@dataclass(frozen=True)
class Batch:
    """uint8 (B, H, W, C), and where each image stands in the whole set."""

    images: Tensor
    indices: Tensor


class ImageStream(ABC):
    """Images that can be gone through once, or from any place on if `length` is known."""

    name: str
    length: int | None

    @abstractmethod
    def batches(self, size: int, start: int, stop: int | None) -> Iterator[Batch]:
        """The batches of this process's share of images start … stop − 1."""


class ArrayImages(ImageStream):
    """Images held in one array or memory map, (n, H, W, C)."""

    def __init__(self, array: np.ndarray | Tensor, name: str = "array") -> None:
        self.name, self.length, self._array = name, len(array), array
        if array.ndim != 4:
            raise ScaleLongError(f"{name} must be images of shape (n, h, w, c), got shape {tuple(array.shape)}")

    def batches(self, size: int, start: int, stop: int | None) -> Iterator[Batch]:
        for indices in _shares(start, stop or len(self._array), size):
            rows = self._array[int(indices[0]) : int(indices[-1]) + 1]
            yield Batch(check_batch(rows, self.name), indices)


class FolderImages(ImageStream):
    """The image files of a folder and the folders in it, sorted by path. All must have one size."""

    def __init__(self, folder: Path | str) -> None:
        from scalelong.data.images import SUFFIXES

        self.folder = Path(folder)
        self.name = self.folder.name or str(self.folder)
        if not self.folder.is_dir():
            raise ScaleLongError(f"{folder} is not a folder")
        self.files = sorted(path for path in self.folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not self.files:
            kinds = ", ".join(sorted(SUFFIXES))
            raise ScaleLongError(f"{folder} holds no images (files that end in {kinds})")
        self.length = len(self.files)

    def batches(self, size: int, start: int, stop: int | None) -> Iterator[Batch]:
        shape = None
        with ThreadPoolExecutor(max_workers=1) as pool:  # Pillow decodes without the interpreter's lock
            for indices, images in _one_ahead(pool, self._read_batch, _shares(start, stop or len(self.files), size)):
                for index, image in zip(indices.tolist(), images, strict=True):
                    shape = shape or image.shape
                    if image.shape != shape:
                        raise ScaleLongError(
                            f"{self.files[index]} is {_size(image.shape)} after images of {_size(shape)}: "
                            "images of mixed sizes have no one FID; bring them to one size first"
                        )
                yield Batch(check_batch(np.stack(images), self.name), indices)

    def _read_batch(self, indices: Tensor) -> list[np.ndarray]:
        return [self._read(index) for index in indices.tolist()]

    def _read(self, index: int) -> np.ndarray:
        from scalelong.data.images import read_image
        from scalelong.data.records import Options

        image = read_image(self.files[index], str(self.files[index]), Options())
        return image if image.ndim == 3 else image[:, :, None]


class StreamImages(ImageStream):
    """Batches from any iterable, such as a sampler. Each process gives its own share of the images."""

    def __init__(self, batches: Iterable[Any], name: str = "stream") -> None:
        self.name, self.length = name, None
        self._batches = iter(batches)

    def batches(self, size: int, start: int, stop: int | None) -> Iterator[Batch]:
        if start:
            raise ScaleLongError(f"{self.name} is a stream: it can only be taken from its beginning")
        rank, world = place()
        wanted = None if stop is None else len(range(rank, stop, world))  # of this process
        seen, shape = 0, None
        for batch in self._batches:
            images = check_batch(batch, self.name)
            shape = shape or images.shape[1:]
            if images.shape[1:] != shape:
                sizes = f"{_size(tuple(images.shape[1:]))} after images of {_size(tuple(shape))}"
                raise ScaleLongError(f"{self.name} gave images of {sizes}; all must have one size")
            if wanted is not None:
                images = images[: wanted - seen]
            if len(images):
                yield Batch(images, (torch.arange(len(images)) + seen) * world + rank)
            seen += len(images)
            if wanted is not None and seen >= wanted:
                return


def image_stream(images: Any, name: str | None = None) -> ImageStream:
    """A stream from a folder, an array (n, H, W, C), an object with such `.images`, or an iterable of batches."""
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
    raise ScaleLongError(f"images must be a folder, an array or batches of uint8 images, not {type(images).__name__}")


def check_batch(batch: Any, name: str) -> Tensor:
    """The batch as a uint8 tensor (B, H, W, C), or the sentence that says what is wrong with it."""
    images = torch.from_numpy(np.array(batch)) if isinstance(batch, np.ndarray) else batch
    if not isinstance(images, Tensor):
        raise ScaleLongError(f"{name} gave {type(batch).__name__} where a batch of images was expected")
    if images.dtype != torch.uint8:
        hint = "; scalelong.evaluation.to_uint8 turns samples in [−1, 1] into it" if images.is_floating_point() else ""
        raise ScaleLongError(f"{name} gave {images.dtype} images where uint8 was expected{hint}")
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ScaleLongError(f"{name} gave shape {tuple(images.shape)} where (b, h, w, 1 or 3) was expected")
    return images


def place() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _shares(start: int, stop: int, size: int) -> Iterator[Tensor]:
    """This process's batches of indices: runs of `size` dealt in turn, so that each index falls to one process."""
    rank, world = place()
    for number, first in enumerate(range(start, stop, size)):
        if number % world == rank:
            yield torch.arange(first, min(first + size, stop))


def _one_ahead(
    pool: ThreadPoolExecutor, read: Callable[[Tensor], list[np.ndarray]], shares: Iterator[Tensor]
) -> Iterator[tuple[Tensor, list[np.ndarray]]]:
    """Read the next batch while the one before it is worked on."""
    waiting = None
    for indices in shares:
        following = (indices, pool.submit(read, indices))
        if waiting is not None:
            yield waiting[0], waiting[1].result()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1].result()


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}×{shape[0]}" + ("" if shape[2] == 3 else " grey")
