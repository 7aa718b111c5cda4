"""Examples to a prepared folder: uint8 images appended to a .npy file, labels, captions, hashes, a manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.cache import MANIFEST
from scalelong.data.captions import clean_captions
from scalelong.data.images import pillow_warnings
from scalelong.data.records import BadExampleError, Example, Options, Pixels, Reading, check_label
from scalelong.errors import ScaleLongError
from scalelong.progress import track

FORMAT = 1  # of the prepared folder


class NpyAppender:
    """A .npy file that grows row by row and is hashed on the way; its header is completed at the end."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.dtype, self.row, self.count = np.dtype(dtype), row, 0
        self._file = open(path, "wb")  # noqa: SIM115 - open until close()
        self._header = self._write_header()
        self._digest = hashlib.sha256()

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows of shape (k, *row)."""
        data = np.ascontiguousarray(rows, dtype=self.dtype)
        assert data.shape[1:] == self.row
        self._file.write(data.data)
        self._digest.update(data.data)
        self.count += len(data)

    @property
    def sha256(self) -> str:
        """Of the array's bytes, without the header."""
        return self._digest.hexdigest()

    def _write_header(self) -> int:
        # NumPy pads headers so that the first axis may grow: the length stays the same.
        shape = (self.count, *self.row)
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def __enter__(self) -> NpyAppender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Write the final shape into the header; after an error, only let go of the file."""
        with self._file:
            if kind is None:
                self._file.seek(0)
                assert self._write_header() == self._header


class SplitWriter:
    """The files of one split. `add` refuses an example that does not go with those before it."""

    def __init__(self, folder: Path, reading: Reading, stack: ExitStack) -> None:
        self._stack = stack
        self._folder, self._reading, self._shape = folder, reading, reading.shape
        self._images: NpyAppender | None = None  # opened by the first example, which gives the shape
        self._labels: list[int] = []
        self._text, self._offsets, self._starts = bytearray(), [0], [0]
        self._contents: list[bytes] = []

    def add(self, example: Example) -> None:
        """Append one example to the files."""
        image = np.ascontiguousarray(example.image, np.uint8)
        _check_shape(image, example.name, self._shape)
        label = _label(example, self._reading.class_names)
        captions = clean_captions(example.captions, example.name) if self._reading.captioned else ()
        if self._images is None:
            _check_space(self._folder, image.nbytes, self._reading.total)
            self._shape = image.shape
            height, width, channels = image.shape
            # Channels first on the disk: a gathered batch is then in the order that networks take.
            images = NpyAppender(self._folder / "images.npy", np.uint8, (channels, height, width))
            self._images = self._stack.enter_context(images)
        self._images.append(image.transpose(2, 0, 1)[None])
        self._labels.append(label)
        for caption in captions:
            self._text += caption.encode()
            self._offsets.append(len(self._text))
        self._starts.append(len(self._offsets) - 1)
        self._contents.append(hashlib.sha256(image.tobytes() + label.to_bytes(8, "little", signed=True)).digest())

    def finish(self) -> dict[str, Any]:
        """Complete the files and return what identifies their contents."""
        assert self._images is not None
        hashes = {"images": self._images.sha256}
        arrays: dict[str, npt.NDArray[Any]] = {}
        classes = self._reading.class_names
        if classes is not None:
            arrays["labels"] = np.asarray(self._labels, np.int64)
        if self._reading.captioned:
            arrays["captions"] = np.frombuffer(self._text, np.uint8)
            arrays["caption_offsets"] = np.asarray(self._offsets, np.int64)
            arrays["caption_starts"] = np.asarray(self._starts, np.int64)
        for name, array in arrays.items():
            with NpyAppender(self._folder / f"{name}.npy", array.dtype) as file:
                file.append(array)
            hashes[name] = file.sha256
        identity = {
            "shape": [self._images.count, *(self._shape or ())],  # (n, h, w, c)
            "class_names": None if classes is None else list(classes),
            "hashes": hashes,
        }
        return {
            **identity,
            "fingerprint": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
            # The same for the same images and labels in any order, to compare sources with one another.
            "content_sha256": hashlib.sha256(b"".join(sorted(self._contents))).hexdigest(),
        }


def write_split(
    folder: Path, reading: Reading, options: Options, *, skip_bad: bool, description: str, **facts: Any
) -> dict[str, Any]:
    """Run the reading's jobs, write what they give to `folder`, and return the manifest written there."""
    skipped: list[BadExampleError] = []
    written = 0
    with pillow_warnings(), closing(_run(reading)) as outcomes, ExitStack() as stack:
        writer = SplitWriter(folder, reading, stack)
        for outcome in track(outcomes, description, total=reading.total):
            try:
                if isinstance(outcome, BadExampleError):
                    raise outcome
                writer.add(outcome)
                written += 1
            except BadExampleError as error:
                if not skip_bad:
                    raise
                skipped.append(error)
    if not written:
        raise ScaleLongError(_nothing(description, skipped))
    manifest = {
        "format": FORMAT,
        **facts,
        "source": reading.source,
        **writer.finish(),
        "options": {key: value for key, value in vars(options).items() if value},
        "skipped": [[error.name, error.reason] for error in skipped],
        **reading.notes,
        "versions": {name: metadata.version(name) for name in ("scalelong", "numpy", "pillow")},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return manifest


def _run(reading: Reading) -> Generator[Example | BadExampleError, None, None]:
    """The jobs' outcomes in order; decoding ones run on threads, a bounded number ahead."""
    if not reading.decodes:
        yield from map(_attempt, reading.jobs)
        return
    workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    jobs = iter(reading.jobs)
    waiting: deque[Future[Example | BadExampleError]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting.extend(pool.submit(_attempt, job) for job in itertools.islice(jobs, 8 * workers))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(_attempt, job) for job in itertools.islice(jobs, 1))
        finally:
            for future in waiting:
                future.cancel()


def _attempt(job: Callable[[], Example]) -> Example | BadExampleError:
    try:
        return job()
    except BadExampleError as error:
        return error


def _check_shape(image: Pixels, name: str, expected: tuple[int, ...] | None) -> None:
    height, width, channels = image.shape
    if height != width:
        raise BadExampleError(name, f"is {width}×{height}, not square; give an image size to crop and resize to")
    if expected is not None and image.shape != expected:
        raise BadExampleError(
            name,
            f"is {width}×{height} with {channels} channels where the others are {expected[1]}×{expected[0]} "
            f"with {expected[2]}; give an image size to bring all to one",
        )


def _label(example: Example, class_names: tuple[str, ...] | None) -> int:
    if class_names is None:
        return -1
    if example.label is None:
        raise BadExampleError(example.name, "has no label")
    return check_label(example.label, len(class_names), example.name)


def _check_space(folder: Path, size: int, total: int | None) -> None:
    free = shutil.disk_usage(folder).free
    if total is not None and size * total > free:
        raise ScaleLongError(
            f"{total:,} images need {size * total / 2**30:.1f} GiB in {folder.parent}, "
            f"where {free / 2**30:.1f} GiB are free; set SCALELONG_CACHE to a larger disk"
        )


def _nothing(description: str, skipped: list[BadExampleError]) -> str:
    if not skipped:
        return f"{description}: there are no images"
    return f"{description}: all {len(skipped)} images are bad; the first: {skipped[0]}"
