"""CelebA's published files, cropped to the face as U-ViT crops them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from scalelong.data.images import fit_array, read_image
from scalelong.data.records import Example, Options, Pixels, Reading, SourceUnavailableError
from scalelong.data.sources import find

SIDE, TOP, LEFT = 128, 57, 25  # the 128 × 128 pixels around (121, 89) of a 178 × 218 picture
# The published partition is by number: 000001.jpg … 162770.jpg, and so on.
RANGES = {"train": (1, 162_770), "validation": (162_771, 182_637), "test": (182_638, 202_599)}


def read_celeba(folder: Path, split: str, options: Options, source: str) -> Reading:
    """One split from a folder that holds the pictures of img_align_celeba."""
    first, last = RANGES[split]
    found = find(folder, f"{first:06d}.jpg")
    if not found:
        raise SourceUnavailableError(f"{folder} does not hold {first:06d}.jpg, the first picture of split {split!r}")
    jobs = (partial(_example, found[0].parent / f"{number:06d}.jpg", options) for number in range(first, last + 1))
    return Reading(jobs, source, last - first + 1, decodes=True)


def read_face(source: Path | bytes, name: str, options: Options) -> Pixels:
    """One aligned picture, cropped to the face and brought to size; one of another size is cropped at its centre."""
    whole = read_image(source, name, Options(background=options.background))
    if whole.shape[:2] == (218, 178):
        whole = np.ascontiguousarray(whole[TOP : TOP + SIDE, LEFT : LEFT + SIDE])
    return fit_array(whole, options)


def _example(path: Path, options: Options) -> Example:
    return Example(path.name, read_face(path, path.name, options))
