"""NumPy files as datasets, memory-mapped and never through pickle.

A `.npy` file holds images; an `.npz` file may hold `images`, `labels`, `captions` and `class_names`, or splits
in the form `x_train`, `y_train`, `x_test`, `y_test`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.cache import open_npy
from scalelong.data.images import MAX_PIXELS
from scalelong.data.records import MAX_CLASSES, SPLITS, Example, Options, Pixels, Reading, choose_split
from scalelong.data.registries import unpacked
from scalelong.errors import DataError, one_line

IMAGES = ("images", "image", "x", "data", "arr_0")
LABELS = ("labels", "label", "y", "arr_1")
CAPTIONS = ("captions", "caption", "text")
Array = npt.NDArray[Any]


def open_arrays(path: Path, stack: ExitStack) -> dict[str, Array]:
    """Map the array of a .npy file (as `images`), or those of an .npz file, which is unpacked until `stack` closes."""
    if path.suffix.lower() == ".npy":
        files = {"images": path}
    else:
        files = {file.stem: file for file in sorted(unpacked(path, stack).glob("*.npy"))}
    arrays = {}
    for name, file in files.items():
        try:
            arrays[name] = open_npy(file)
        except Exception as error:  # NumPy raises many kinds of errors for a damaged header
            raise DataError(f"{path.name}: array {name} cannot be opened ({one_line(error)})") from None
    return arrays


def read_numpy(path: Path, split: str, options: Options, stack: ExitStack) -> Reading:
    """Read one split of a NumPy file."""
    arrays = open_arrays(path, stack)
    named = {name: key for name, aliases in SPLITS.items() if (key := _find(arrays, IMAGES, aliases)) is not None}
    splits: dict[str, str | None] = {**named} or {"train": _find(arrays, IMAGES)}
    part = choose_split(split, splits, options.holdout, str(path))
    key, aliases = splits[part.split], SPLITS[part.split] if named else ()
    if key is None:
        found = ", ".join(arrays) or "no arrays"
        raise DataError(f"{path}: expected an array of images named {', '.join(IMAGES)}, got {found}")
    images = arrays[key]
    _check_images(path, key, images)
    labels = class_names = captions = None
    if (key := _find(arrays, LABELS, aliases)) is not None:
        labels = _labels(path, key, arrays[key], len(images))
        class_names = _class_names(path, arrays, labels)
    if (key := _find(arrays, CAPTIONS)) is not None and len(splits) == 1:
        captions = _captions(path, key, arrays[key], len(images))
    rows = [row for row in range(len(images)) if part.includes(f"row {row}", options.holdout)]

    def examples() -> Iterator[Example]:
        for row in rows:
            label = None if labels is None else int(labels[row])
            texts = () if captions is None else tuple(str(text) for text in np.atleast_1d(captions[row]))
            yield Example(f"{path.name} row {row}", _channels_last(images[row]), label, texts)

    return Reading(examples(), len(rows), class_names, captions is not None)


def _channels_last(pixels: Array) -> Pixels:
    if pixels.ndim == 2:
        return pixels[:, :, None]
    return pixels if pixels.shape[2] in (1, 3) else pixels.transpose(1, 2, 0)


def _find(arrays: dict[str, Array], stems: tuple[str, ...], aliases: tuple[str, ...] = ()) -> str | None:
    """Return the first name in `arrays`: a stem, or a stem with a split's alias as in `x_train` or `train_labels`."""
    forms = (form for stem in stems for alias in aliases for form in (f"{stem}_{alias}", f"{alias}_{stem}"))
    return next((form for form in (forms if aliases else stems) if form in arrays), None)


def _check_images(path: Path, key: str, array: Array) -> None:
    shape = array.shape
    layout = len(shape) == 3 or (len(shape) == 4 and (shape[3] in (1, 3) or shape[1] in (1, 3)))
    if array.dtype != np.uint8 or not layout or 0 in shape or math.prod(shape[1:]) > 3 * MAX_PIXELS:
        expected = f"uint8 (n, h, w), (n, h, w, c) or (n, c, h, w) with c of 1 or 3 and up to {MAX_PIXELS:,} pixels"
        raise _wrong(path, key, expected, array)


def _labels(path: Path, key: str, array: Array, count: int) -> npt.NDArray[np.int64]:
    if array.dtype.kind not in "iu" or array.shape not in ((count,), (count, 1)):
        raise _wrong(path, key, f"{count} integers", array)
    return array.reshape(-1).astype(np.int64)


def _class_names(path: Path, arrays: dict[str, Array], labels: npt.NDArray[np.int64]) -> tuple[str, ...]:
    if "class_names" in arrays:
        return tuple(_texts(path, "class_names", arrays["class_names"]).reshape(-1).tolist())
    if labels.max() >= MAX_CLASSES:
        raise DataError(f"{path}: labels must count up from 0, got {labels.max()}")
    return tuple(str(index) for index in range(max(int(labels.max()) + 1, 1)))


def _captions(path: Path, key: str, array: Array, count: int) -> npt.NDArray[np.str_]:
    if array.ndim not in (1, 2) or len(array) != count:
        raise _wrong(path, key, f"text of shape ({count},) or ({count}, k)", array)
    return _texts(path, key, array)


def _texts(path: Path, key: str, array: Array) -> npt.NDArray[np.str_]:
    if array.dtype.kind not in "US":
        raise _wrong(path, key, "text", array)
    try:
        return array if array.dtype.kind == "U" else np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path.name}: {key} must be UTF-8 text") from None


def _wrong(path: Path, key: str, expected: str, array: Array) -> DataError:
    return DataError(f"{path.name}: {key} must be {expected}, got {array.dtype} of shape {array.shape}")
