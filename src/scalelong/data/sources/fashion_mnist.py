"""Fashion-MNIST's published files: four gzipped idx files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalelong.data.images import fit_array
from scalelong.data.records import Example, Options, Pixels, Reading, SourceUnavailableError
from scalelong.data.sources import find
from scalelong.errors import ScaleLongError

CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
PREFIX = {"train": "train", "test": "t10k"}
COUNT = {"train": 60_000, "test": 10_000}


def read_fashion_mnist(folder: Path, split: str, options: Options, source: str) -> Reading:
    """One split from a folder that holds the idx files, gzipped or not."""
    count = COUNT[split]
    images = _read_idx(_find(folder, f"{PREFIX[split]}-images-idx3-ubyte"), (count, 28, 28))
    labels = _read_idx(_find(folder, f"{PREFIX[split]}-labels-idx1-ubyte"), (count,))

    def jobs() -> Iterator[partial[Example]]:
        for row in range(count):
            yield partial(
                _example, f"fashion-mnist {split} row {row}", images[row][:, :, None], int(labels[row]), options
            )

    return Reading(jobs(), source, count, CLASSES)


def _example(name: str, image: Pixels, label: int, options: Options) -> Example:
    return Example(name, fit_array(image, options), label)


def _find(folder: Path, stem: str) -> Path:
    for name in (f"{stem}.gz", stem):
        if found := find(folder, name):
            return found[0]
    raise SourceUnavailableError(f"{folder} does not hold {stem}.gz")


def _read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """An idx file of bytes: two zero bytes, the type 8, the number of dimensions, their sizes, the values."""
    expected = bytes((0, 0, 8, len(shape))) + b"".join(side.to_bytes(4, "big") for side in shape)
    size = len(expected) + int(np.prod(shape))
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(size + 1)  # and no more, however much the file unpacks to
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ScaleLongError(f"{path} is damaged ({error})") from None
    if data[: len(expected)] != expected or len(data) != size:
        raise ScaleLongError(f"{path} is not the idx file of {' × '.join(map(str, shape))} bytes that it should be")
    return np.frombuffer(data, np.uint8, offset=len(expected)).reshape(shape)
