"""NumPy files as datasets, row by row and never through pickle.

A `.npy` file holds images; an `.npz` file may hold `images`, `labels`, `captions` and `class_names`, or splits
in the form `x_train`, `y_train`, `x_test`, `y_test`.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from scalelong.data.images import MAX_PIXELS, fit_array
from scalelong.data.records import Example, Options, Pixels, Reading
from scalelong.data.splits import ALIASES, choose
from scalelong.errors import ScaleLongError

IMAGES = ("images", "image", "x", "data", "arr_0")
LABELS = ("labels", "label", "y", "arr_1")
CAPTIONS = ("captions", "caption", "text")
MAX_CLASSES = 1_000_000
MAX_SIDE_BYTES = 1 << 30  # of labels, captions and class names, which are read whole


@dataclass(frozen=True)
class ArrayFile:
    """One array in a .npy file or in a member of an .npz file; only its header has been read."""

    path: Path
    member: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def title(self) -> str:
        return _title(self.path, self.member)

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """The rows one after the other, read in pieces of a few megabytes."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, (4 << 20) // max(size, 1))
        with self._open() as file:
            for start in range(0, self.shape[0], step):
                count = min(step, self.shape[0] - start)
                data = _read_exactly(file, count * size, self.title)
                yield from np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def whole(self) -> npt.NDArray[Any]:
        """The array in memory; for labels and captions, which are small."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if size > MAX_SIDE_BYTES:
            raise ScaleLongError(f"{self.title} has {size:,} bytes; at most {MAX_SIDE_BYTES:,} are read")
        with self._open() as file:
            return np.frombuffer(_read_exactly(file, size, self.title), self.dtype).reshape(self.shape)

    def _open(self) -> IO[bytes]:
        """The file at the array's first byte."""
        file, dtype, shape = _open(self.path, self.member)
        if (dtype, shape) != (self.dtype, self.shape):
            file.close()
            raise ScaleLongError(f"{self.title} changed while it was read")
        return file


def open_arrays(path: Path) -> dict[str, ArrayFile]:
    """The arrays of a .npy file (under the name `images`) or of an .npz file."""
    if path.suffix.lower() == ".npy":
        return {"images": _describe(path, None)}
    with _damage(path.name), zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    return {name[: -len(".npy")]: _describe(path, name) for name in members}


def read_numpy(path: Path, split: str, options: Options, *, source: str) -> Reading:
    """One split of a NumPy file."""
    arrays = open_arrays(path)
    named = {name: _of_split(arrays, aliases) for name, aliases in ALIASES.items()}
    available = {name: keys for name, keys in named.items() if keys is not None}
    if not available:
        key = next((key for key in IMAGES if key in arrays), None)
        if key is None:
            raise ScaleLongError(f"{path} has no array of images named {', '.join(IMAGES)}; it has {', '.join(arrays)}")
        available = {"train": (key, next((label for label in LABELS if label in arrays), None))}
    part = choose(split, available, options.holdout, str(path))
    image_key, label_key = available[part.split]
    images = arrays[image_key]
    _check_images(images)
    labels = None if label_key is None else _labels(arrays[label_key], images)
    names = _class_names(arrays, labels)
    captions = next((_captions(arrays[key], images) for key in CAPTIONS if key in arrays and len(available) == 1), None)
    taken = [part.takes(f"row {row}", options.holdout) for row in range(images.shape[0])]

    def jobs() -> Iterator[partial[Example]]:
        for row, pixels in enumerate(images.rows()):
            if taken[row]:
                label = None if labels is None else int(labels[row])
                texts = () if captions is None else tuple(str(text) for text in np.atleast_1d(captions[row]))
                yield partial(_example, f"{path.name} row {row}", pixels, label, texts, options)

    return Reading(jobs(), source, sum(taken), names, captions is not None)


def _example(
    name: str, pixels: npt.NDArray[Any], label: int | None, texts: tuple[str, ...], options: Options
) -> Example:
    return Example(name, fit_array(_channels_last(pixels), options), label, texts)


def _channels_last(pixels: npt.NDArray[Any]) -> Pixels:
    if pixels.ndim == 2:
        return pixels[:, :, None]
    return pixels if pixels.shape[2] in (1, 3) else pixels.transpose(1, 2, 0)


def _of_split(arrays: dict[str, ArrayFile], aliases: tuple[str, ...]) -> tuple[str, str | None] | None:
    """The keys of a split's images and labels, as in `x_train` and `train_labels`."""

    def find(stems: tuple[str, ...]) -> str | None:
        forms = (form for stem in stems for alias in aliases for form in (f"{stem}_{alias}", f"{alias}_{stem}"))
        return next((form for form in forms if form in arrays), None)

    images = find(IMAGES)
    return None if images is None else (images, find(LABELS))


def _check_images(array: ArrayFile) -> None:
    if array.dtype != np.uint8:
        raise ScaleLongError(f"{array.title} is {array.dtype}; images must be uint8, 0 to 255")
    shape = array.shape
    if not (len(shape) == 3 or (len(shape) == 4 and (shape[3] in (1, 3) or shape[1] in (1, 3)))) or 0 in shape:
        raise ScaleLongError(
            f"{array.title} has shape {shape}; images must be (n, h, w), (n, h, w, c) or (n, c, h, w) with c of 1 or 3"
        )
    if math.prod(shape[1:]) > 3 * MAX_PIXELS:
        raise ScaleLongError(f"{array.title} has images of more than {MAX_PIXELS:,} pixels")


def _labels(array: ArrayFile, images: ArrayFile) -> npt.NDArray[np.int64]:
    _same_length(array, images)
    if array.dtype.kind not in "iu" or math.prod(array.shape) != images.shape[0]:
        raise ScaleLongError(
            f"{array.title} is {array.dtype} {array.shape}; labels must be whole numbers, one an image"
        )
    return array.whole().reshape(-1).astype(np.int64)


def _class_names(arrays: dict[str, ArrayFile], labels: npt.NDArray[np.int64] | None) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if "class_names" in arrays:
        return tuple(_text(name) for name in arrays["class_names"].whole().reshape(-1))
    top = int(labels.max())
    if top > MAX_CLASSES:
        raise ScaleLongError(f"{next(iter(arrays.values())).path} has label {top}; labels count up from 0")
    return tuple(str(index) for index in range(max(top + 1, 1)))


def _captions(array: ArrayFile, images: ArrayFile) -> npt.NDArray[np.str_]:
    _same_length(array, images)
    if array.dtype.kind not in "US" or len(array.shape) > 2:
        raise ScaleLongError(f"{array.title} is {array.dtype} {array.shape}; captions must be text, (n,) or (n, k)")
    values = array.whole()
    try:
        return values if array.dtype.kind == "U" else np.char.decode(values, "utf-8")
    except UnicodeDecodeError:
        raise ScaleLongError(f"{array.title} is not UTF-8 text") from None


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _same_length(array: ArrayFile, images: ArrayFile) -> None:
    if not array.shape or array.shape[0] != images.shape[0]:
        raise ScaleLongError(f"{array.title} has shape {array.shape} where {images.title} has {images.shape[0]} images")


def _describe(path: Path, member: str | None) -> ArrayFile:
    file, dtype, shape = _open(path, member)
    title = _title(path, member)
    with file, _damage(title):
        there = _size(path, member) - file.tell()
    missing = math.prod(shape) * dtype.itemsize - there
    if missing > 0:
        raise ScaleLongError(f"{title} ends early: {missing:,} bytes are missing")
    return ArrayFile(path, member, dtype, shape)


def _title(path: Path, member: str | None) -> str:
    return path.name if member is None else f"{path.name}[{member!r}]"


def _size(path: Path, member: str | None) -> int:
    if member is None:
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(member).file_size


def _open(path: Path, member: str | None) -> tuple[IO[bytes], np.dtype[Any], tuple[int, ...]]:
    """Open an array and read its header. Objects, which would be pickles, are refused."""
    title = _title(path, member)
    with ExitStack() as stack, _damage(title):
        if member is None:
            file: IO[bytes] = stack.enter_context(open(path, "rb"))
        else:
            with zipfile.ZipFile(path) as archive:  # the member keeps the file open by itself
                file = stack.enter_context(archive.open(member))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ScaleLongError(f"{title} holds Python objects, which only pickle could read; it is not opened")
        if fortran and len(shape) > 1:
            raise ScaleLongError(f"{title} is in Fortran order; save it with numpy.ascontiguousarray")
        if any(side < 0 for side in shape):
            raise ScaleLongError(f"{title} has shape {shape}")
        stack.pop_all()
        return file, dtype, shape
    raise AssertionError("unreachable")


def _read_exactly(file: IO[bytes], size: int, title: str) -> bytes:
    with _damage(title):
        data = file.read(size)
    if len(data) != size:
        raise ScaleLongError(f"{title} ends early: {size - len(data):,} bytes are missing")
    return data


@contextmanager
def _damage(title: str) -> Iterator[None]:
    """One sentence for anything that a damaged file makes the readers of zip files and of NumPy's headers raise."""
    try:
        yield
    except ScaleLongError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ScaleLongError(f"{title} is not a NumPy file, or it is damaged ({reason})") from None
