"""Write examples into a prepared folder: uint8 images appended to a .npy file, labels, captions, hashes, a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.cache import NpyWriter, write_array, write_manifest
from scalelong.data.dataset import FORMAT
from scalelong.data.images import pillow_warnings, read_image
from scalelong.data.records import BadExampleError, Example, Options, Pixels, Reading, clean_captions
from scalelong.errors import DataError
from scalelong.progress import track

_Decoded = tuple[str, Pixels, int, tuple[str, ...]]  # name, image, label, captions


def write_split(
    folder: Path, reading: Reading, options: Options, *, skip_bad: bool, description: str, **facts: Any
) -> dict[str, Any]:
    """Run the jobs of a reading, write their examples to `folder`, and return the manifest."""
    skipped: list[BadExampleError] = []
    with pillow_warnings(), closing(_decoded(reading, options)) as outcomes, ExitStack() as stack:
        writer = _Writer(folder, reading, stack)
        for outcome in track(outcomes, description, total=reading.total):
            try:
                if isinstance(outcome, BadExampleError):
                    raise outcome
                writer.add(*outcome)
            except BadExampleError as error:
                if not skip_bad:
                    raise
                skipped.append(error)
    if writer.images is None:
        reason = f"all {len(skipped)} images are bad; the first: {skipped[0]}" if skipped else "there are no images"
        raise DataError(f"{description}: {reason}")
    manifest = {
        "format": FORMAT,
        **facts,
        "source": reading.source,
        **writer.finish(),
        "options": {key: value for key, value in vars(options).items() if value},
        "skipped": [[error.name, error.reason] for error in skipped],
        **reading.extra,
        "versions": {name: metadata.version(name) for name in ("scalelong", "numpy", "pillow")},
    }
    write_manifest(folder, manifest)
    return manifest


class _Writer:
    """The files of one split. `add` rejects an example that does not match the previous ones."""

    def __init__(self, folder: Path, reading: Reading, stack: ExitStack) -> None:
        self._folder, self._reading, self._stack = folder, reading, stack
        self._shape = reading.shape
        self.images: NpyWriter | None = None  # opened by the first example, which determines the shape
        self._labels: list[int] = []
        self._text, self._offsets, self._starts = bytearray(), [0], [0]
        self._contents: list[bytes] = []

    def add(self, name: str, image: Pixels, label: int, captions: tuple[str, ...]) -> None:
        """Append one example to the files."""
        _check_shape(image, name, self._shape)
        if self.images is None:
            _check_space(self._folder, image.nbytes, self._reading.total)
            self._shape = image.shape
            height, width, channels = image.shape
            # Channels first on disk, so that a gathered batch is already (B, C, H, W).
            images = NpyWriter(self._folder / "images.npy", np.uint8, (channels, height, width))
            self.images = self._stack.enter_context(images)
        self.images.append(image.transpose(2, 0, 1)[None])
        self._labels.append(label)
        for caption in captions:
            self._text += caption.encode()
            self._offsets.append(len(self._text))
        self._starts.append(len(self._offsets) - 1)
        self._contents.append(hashlib.sha256(image.tobytes() + label.to_bytes(8, "little", signed=True)).digest())

    def finish(self) -> dict[str, Any]:
        """Write the remaining arrays and return what identifies the contents."""
        assert self.images is not None
        arrays: dict[str, npt.NDArray[Any]] = {}
        classes = self._reading.class_names
        if classes is not None:
            arrays["labels"] = np.asarray(self._labels, np.int64)
        if self._reading.captioned:
            arrays["captions"] = np.frombuffer(self._text, np.uint8)
            arrays["caption_offsets"] = np.asarray(self._offsets, np.int64)
            arrays["caption_starts"] = np.asarray(self._starts, np.int64)
        hashes = {name: write_array(self._folder / f"{name}.npy", array) for name, array in arrays.items()}
        identity = {
            "shape": [self.images.count, *(self._shape or ())],  # (n, h, w, c)
            "class_names": None if classes is None else list(classes),
            "hashes": {"images": self.images.sha256, **hashes},
        }
        return {
            **identity,
            "fingerprint": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
            # Independent of the order of the examples, to compare sources with each other.
            "content_sha256": hashlib.sha256(b"".join(sorted(self._contents))).hexdigest(),
        }


def _decoded(reading: Reading, options: Options) -> Generator[_Decoded | BadExampleError, None, None]:
    """Yield the decoded examples in order. Image files are decoded by threads, a bounded number ahead."""
    decode = partial(_decode, reading=reading, options=options)
    workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    pending: deque[Future[_Decoded | BadExampleError]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for example in reading.examples:
                if isinstance(example.image, np.ndarray):  # faster than a thread
                    yield decode(example)
                    continue
                pending.append(pool.submit(decode, example))
                if len(pending) == 8 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _decode(example: Example, reading: Reading, options: Options) -> _Decoded | BadExampleError:
    try:
        label, classes = -1, reading.class_names
        if classes is not None:
            if example.label is None:
                raise BadExampleError(example.name, "has no label")
            if not 0 <= example.label < len(classes):
                raise BadExampleError(example.name, f"has label {example.label}, expected 0…{len(classes) - 1}")
            label = example.label
        captions = clean_captions(example.captions, example.name) if reading.captioned else ()
        image = (reading.decode or read_image)(example.image, example.name, options)
        return example.name, np.ascontiguousarray(image, np.uint8), label, captions
    except BadExampleError as error:
        return error


def _check_shape(image: Pixels, name: str, expected: tuple[int, ...] | None) -> None:
    height, width, channels = image.shape
    if height != width:
        raise BadExampleError(name, f"is {width}×{height}, not square; set image_size (--image-size) to crop it")
    if expected is not None and image.shape != expected:
        raise BadExampleError(
            name,
            f"is {width}×{height}×{channels}, expected {expected[1]}×{expected[0]}×{expected[2]} as the others; "
            "set image_size (--image-size) to resize all images",
        )


def _check_space(folder: Path, size: int, total: int | None) -> None:
    free = shutil.disk_usage(folder).free
    if total is not None and size * total > free:
        raise DataError(
            f"{total:,} images need {size * total / 2**30:.1f} GiB in {folder.parent}, but only "
            f"{free / 2**30:.1f} GiB are free; set SCALELONG_CACHE to a larger disk"
        )
