"""What a dataset holds, from the headers of its files: number and size of images, colour, classes, captions."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from scalelong.data.images import Header, read_header
from scalelong.data.prepare import Manifest, Origin, resolve
from scalelong.data.records import Options
from scalelong.errors import DataError
from scalelong.progress import track


@dataclass(frozen=True)
class Survey:
    """The facts that decide how to train on a dataset."""

    images: int
    width: int  # medians, in pixels
    height: int
    side: int  # the median of the shorter sides
    one_size: bool  # all images are square and have the same size
    grey: bool  # no image has colour
    transparent: bool  # some images have an alpha channel
    class_names: tuple[str, ...] | None = None
    captions: bool = False

    def __str__(self) -> str:
        size = f"{self.width}×{self.height}" + ("" if self.one_size else " (median)")
        words = [f"{self.images:,} image{'' if self.images == 1 else 's'}", size, "grey" if self.grey else "colour"]
        words += ["with transparency"] if self.transparent else []
        words += [f"{len(self.class_names)} classes"] if self.class_names else []
        return ", ".join([*words, "captions"] if self.captions else words)


def survey(name: str, split: str = "train", **options: Any) -> Survey:
    """Look at every image's header. `options` are those of `load` that choose images: holdout and columns."""
    origin = resolve(name)
    if origin.spec is not None:
        return _of_spec(origin, split)
    with ExitStack() as stack:
        reading = origin.open(split, Options(**options), True, stack)
        headers: list[Header] = []
        for example in track(reading.examples, f"looking at {origin.name}", reading.total):
            if isinstance(example.image, np.ndarray):  # the rows of an array are alike
                height, width, channels = example.image.shape
                headers = [Header(width, height, channels == 1, False)] * (reading.total or 1)
                break
            if example.image is not None and (header := read_header(example.image)) is not None:
                headers.append(header)
    if not headers:
        raise DataError(f"{origin.name} has no image that can be read in split {split!r}; choose another folder")
    return _summary(headers, reading.class_names, reading.captioned)


def survey_of(manifest: Manifest) -> Survey:
    """Return the facts of prepared data."""
    count, height, width, channels = manifest["shape"]
    names = manifest["class_names"]
    captions = "captions" in manifest["hashes"]
    return Survey(count, width, height, height, True, channels == 1, False, names and tuple(names), captions)


def _of_spec(origin: Origin, split: str) -> Survey:
    spec = origin.spec
    assert spec is not None
    size, names = spec.image_size, spec.class_names or tuple(map(str, range(spec.num_classes or 0))) or None
    count = spec.counts[spec.split(split)][0]
    return Survey(count, size, size, size, True, spec.channels == 1, False, names, spec.captions)


def _summary(headers: Sequence[Header], names: tuple[str, ...] | None, captions: bool) -> Survey:
    sizes = {(header.width, header.height) for header in headers}
    return Survey(
        images=len(headers),
        width=int(median(header.width for header in headers)),
        height=int(median(header.height for header in headers)),
        side=int(median(min(header.width, header.height) for header in headers)),
        one_size=len(sizes) == 1 and all(width == height for width, height in sizes),
        grey=all(header.grey for header in headers),
        transparent=any(header.transparent for header in headers),
        class_names=names,
        captions=captions,
    )
