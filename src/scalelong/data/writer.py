"""Write examples into a prepared folder: images.npy, labels, captions, hashes and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalelong.data.cache import NpyWriter, write_array, write_manifest
from scalelong.data.dataset import FORMAT
from scalelong.data.images import pillow_warnings, read_image
from scalelong.data.records import BadExampleError, Example, Options, Pixels, Reading, clean_captions
from scalelong.errors import DataError
from scalelong.progress import track


class Decoded(NamedTuple):
    """An example that can be written."""

    name: str
    image: Pixels
    label: int  # -1 without classes
    captions: tuple[str, ...]


def write_split(
    folder: Path, reading: Reading, options: Options, *, skip_bad: bool, description: str, **facts: Any
) -> dict[str, Any]:
    """Decode the examples of a reading, write them to `folder`, and return the manifest."""
    shape = reading.shape  # of every image; by default the first image's
    labels: list[int] = []
    text, offsets, starts = bytearray(), [0], [0]
    contents: list[bytes] = []
    skipped: list[BadExampleError] = []
    with (
        pillow_warnings(),
        closing(_decoded(reading, options)) as outcomes,
        NpyWriter(folder / "images.npy", np.uint8) as images,
    ):
        for outcome in track(outcomes, description, total=reading.total):
            if isinstance(outcome, Decoded):
                outcome = _wrong_shape(outcome, shape) or outcome
            if isinstance(outcome, BadExampleError):
                if not skip_bad:
                    raise outcome
                skipped.append(outcome)
                continue
            _, image, label, captions = outcome
            if not images.count:
                shape = image.shape
                _check_space(folder, image.nbytes, reading.total)
            images.append(image.transpose(2, 0, 1)[None])  # channels first, as a gathered batch has them
            labels.append(label)
            for caption in captions:
                text += caption.encode()
                offsets.append(len(text))
            starts.append(len(offsets) - 1)
            contents.append(hashlib.sha256(image.tobytes() + label.to_bytes(8, "little", signed=True)).digest())
    if shape is None or not images.count:
        reason = f"all {len(skipped)} images are bad; the first: {skipped[0]}" if skipped else "there are no images"
        raise DataError(f"{description}: {reason}")
    arrays: dict[str, Any] = {}
    if reading.class_names is not None:
        arrays["labels"] = np.asarray(labels, np.int64)
    if reading.captioned:
        arrays["captions"] = np.frombuffer(text, np.uint8)
        arrays["caption_offsets"] = np.asarray(offsets, np.int64)
        arrays["caption_starts"] = np.asarray(starts, np.int64)
    hashes = {name: write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
    identity = {
        "shape": [images.count, *shape],  # (n, h, w, c)
        "class_names": None if reading.class_names is None else list(reading.class_names),
        "hashes": {"images": images.sha256, **hashes},
    }
    manifest = {
        "format": FORMAT,
        **facts,
        "source": reading.source,
        **identity,
        "fingerprint": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        # Independent of the order of the examples, to compare sources with each other.
        "content_sha256": hashlib.sha256(b"".join(sorted(contents))).hexdigest(),
        "options": {key: value for key, value in vars(options).items() if value},
        "skipped": [[error.name, error.reason] for error in skipped],
        **reading.extra,
        "versions": {name: metadata.version(name) for name in ("scalelong", "numpy", "pillow")},
    }
    write_manifest(folder, manifest)
    return manifest


def _decoded(reading: Reading, options: Options) -> Generator[Decoded | BadExampleError, None, None]:
    """Yield the decoded examples in order. Image files are decoded by threads, a bounded number ahead."""
    decode = partial(_decode, reading=reading, options=options)
    workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    pending: deque[Future[Decoded | BadExampleError]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for example in reading.examples:
                if isinstance(example.image, np.ndarray):  # too little work for a thread
                    yield decode(example)
                    continue
                pending.append(pool.submit(decode, example))
                if len(pending) == 8 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _decode(example: Example, reading: Reading, options: Options) -> Decoded | BadExampleError:
    name, label, classes = example.name, -1, reading.class_names
    try:
        if classes is not None:
            if example.label is None:
                raise BadExampleError(name, "has no label")
            if not 0 <= example.label < len(classes):
                raise BadExampleError(name, f"has label {example.label}, expected 0…{len(classes) - 1}")
            label = example.label
        captions = clean_captions(example.captions, name) if reading.captioned else ()
        image = (reading.decode or read_image)(example.image, name, options)
        return Decoded(name, np.ascontiguousarray(image, np.uint8), label, captions)
    except BadExampleError as error:
        return error


def _wrong_shape(example: Decoded, expected: tuple[int, ...] | None) -> BadExampleError | None:
    height, width, channels = example.image.shape
    size = f"is {width}×{height}×{channels}"
    if height != width:
        return BadExampleError(example.name, f"{size}, not square; set image_size (--image-size) to crop it")
    if expected is not None and example.image.shape != expected:
        others = f"the others are {expected[1]}×{expected[0]}×{expected[2]}"
        return BadExampleError(example.name, f"{size}, but {others}; set image_size (--image-size) to resize all")
    return None


def _check_space(folder: Path, size: int, total: int | None) -> None:
    free = shutil.disk_usage(folder).free
    if total is not None and size * total > free:
        needed, available = (f"{count / 2**30:.1f} GiB" for count in (size * total, free))
        raise DataError(
            f"{total:,} images need {needed} in {folder.parent}, which has {available} free; "
            "set SCALELONG_CACHE to a larger disk"
        )
