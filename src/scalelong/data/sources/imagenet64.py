"""ImageNet at 64 × 64: the downsampled .npz batches, or the full-size pictures in folders by class."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from scalelong.data.folder import read_folder
from scalelong.data.images import fit_array
from scalelong.data.numpy_files import ArrayFile, open_arrays
from scalelong.data.records import Example, Options, Pixels, Reading, SourceUnavailableError
from scalelong.data.sources import find
from scalelong.errors import ScaleLongError

BATCHES = {"train": "train_data_batch_*.npz", "validation": "val_data.npz"}
FOLDERS = {"train": ("train",), "validation": ("val", "validation")}
CLASSES = tuple(str(label) for label in range(1000))


def read_imagenet64(folder: Path, split: str, options: Options, source: str) -> Reading:
    """One split from a folder that holds the .npz batches, or train/ and val/ with a folder for each class."""
    paths = sorted(find(folder, BATCHES[split], depth=1), key=lambda path: (len(path.name), path.name))
    if paths:
        batches = [_open(path) for path in paths]
        total = sum(images.shape[0] for images, _ in batches)
        return Reading(_jobs(batches, options), source, total, CLASSES)
    for name in FOLDERS[split]:
        if (folder / name).is_dir():
            reading = read_folder(folder / name, "train", options, source=source)
            if reading.class_names is not None and len(reading.class_names) == 1000:
                return reading
            found = len(reading.class_names or ())
            raise SourceUnavailableError(f"{folder / name} has {found} class folders, not 1,000")
    raise SourceUnavailableError(f"{folder} holds neither {BATCHES[split]} nor a folder {FOLDERS[split][0]}")


def _open(path: Path) -> tuple[ArrayFile, ArrayFile]:
    arrays = open_arrays(path)
    images, labels = arrays.get("data"), arrays.get("labels")
    if images is None or labels is None:
        raise ScaleLongError(f"{path} has no arrays `data` and `labels`; it has {', '.join(arrays)}")
    if images.dtype != np.uint8 or images.shape[1:] != (64 * 64 * 3,) or labels.shape != images.shape[:1]:
        raise ScaleLongError(
            f"{path} has data {images.dtype} {images.shape} and labels {labels.shape}, not uint8 (n, 12288) and (n,)"
        )
    return images, labels


def _jobs(batches: list[tuple[ArrayFile, ArrayFile]], options: Options) -> Iterator[partial[Example]]:
    for images, labels in batches:
        classes = labels.whole()
        for row, pixels in enumerate(images.rows()):
            # The batches count classes from 1, and hold red, then green, then blue.
            image = pixels.reshape(3, 64, 64).transpose(1, 2, 0)
            yield partial(_example, f"{images.path.name} row {row}", image, int(classes[row]) - 1, options)


def _example(name: str, image: Pixels, label: int, options: Options) -> Example:
    return Example(name, fit_array(image, options), label)
