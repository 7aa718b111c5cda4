"""The embedded digits of scikit-learn: 1,797 images of 8 × 8 grey pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from scalelong.data.images import fit_array
from scalelong.data.records import Example, Options, Pixels, Reading
from scalelong.errors import require

HELD_OUT = 30  # images of each class that are for validation


def read_digits(split: str, options: Options) -> Reading:
    """`train` or `validation`; which image is in which does not depend on any library's random numbers."""
    bunch = require("sklearn.datasets", "train", "the embedded digits").load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # 0…16 → 0…255, (n, 8, 8, 1)
    labels = bunch.target.astype(int)
    held_out: set[int] = set()
    for label in range(10):
        held_out.update(sorted(np.flatnonzero(labels == label).tolist(), key=_order)[:HELD_OUT])
    rows = [row for row in range(len(labels)) if (row in held_out) == (split == "validation")]

    def jobs() -> Iterator[partial[Example]]:
        for row in rows:
            yield partial(_example, row, images[row], int(labels[row]), options)

    return Reading(jobs(), "scikit-learn load_digits", len(rows), tuple("0123456789"))


def _order(row: int) -> bytes:
    return hashlib.sha256(f"digits {row}".encode()).digest()


def _example(row: int, image: Pixels, label: int, options: Options) -> Example:
    return Example(f"digits row {row}", fit_array(image, options), label)
