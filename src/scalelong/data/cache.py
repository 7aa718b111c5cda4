"""Folders in the cache that are written once, by one process, whole or not at all, and the arrays in them."""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from scalelong.errors import DataError, ScaleLongError, one_line
from scalelong.files import atomic_folder, read_json

MANIFEST = "manifest.json"  # written last: a folder that has it is complete
PATIENCE = 2.0  # seconds of waiting for another process without a message
STALE = 24 * 3600  # seconds after which the leftovers of a killed process are removed


def build_once(folder: Path, write: Callable[[Path], None], *, force: bool = False) -> None:
    """Fill `folder` with `write` unless it exists. With `force`, write it again and replace it at the end."""
    manifest = folder / MANIFEST
    if manifest.is_file() and not force:
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            if force or not manifest.is_file():
                _build(folder, write)
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        raise DataError(f"could not write {folder} ({path}{error.strerror or error})") from error


def lock_folder(folder: Path) -> AbstractContextManager[Any]:
    """Let one process work on `folder` while others wait."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        return lock.acquire(timeout=PATIENCE)
    except Timeout:
        print(f"waiting for another process that prepares {folder}", file=sys.stderr, flush=True)
        return lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return nullcontext()  # a network file system without locks: the first process to finish wins


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(".*.part"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > STALE:
                shutil.rmtree(leftover, ignore_errors=True)
    replaced = folder.exists()  # forced, or left without a manifest
    try:
        with atomic_folder(folder) as temporary:
            write(temporary)
            if replaced:  # renamed before it is deleted, so that nobody sees half of it
                with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent) as trash:
                    os.rename(folder, Path(trash, "old"))
    except (ScaleLongError, OSError):
        if replaced or not (folder / MANIFEST).is_file():  # otherwise another process was faster
            raise


class NpyWriter(AbstractContextManager["NpyWriter"]):
    """A .npy file that grows row by row and is hashed on the way. Its header is completed at the end."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.dtype, self.count = np.dtype(dtype), 0
        self._row: tuple[int, ...] = ()  # the shape of a row, from the first ones
        self._file = open(path, "wb")  # noqa: SIM115 - open until __exit__
        self.digest = hashlib.sha256()  # of the array's bytes, without the header

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows of shape (k, *row)."""
        data = np.ascontiguousarray(rows, dtype=self.dtype)
        if not self.count:
            self._row = data.shape[1:]
            self._write_header()
        assert data.shape[1:] == self._row
        self._file.write(data.data)
        self.digest.update(data.data)
        self.count += len(data)

    def _write_header(self) -> None:
        # NumPy pads headers so that the first axis may grow without changing the header's length.
        self._file.seek(0)
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.count, *self._row)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        with self._file:
            if kind is None:
                self._write_header()


def write_array(path: Path, array: npt.NDArray[Any]) -> str:
    """Write a one-dimensional array as .npy and return the hash of its bytes."""
    with NpyWriter(path, array.dtype) as file:
        file.append(array)
    return file.digest.hexdigest()


def open_npy(path: Path, mode: Literal["r", "c"] | None = "r") -> npt.NDArray[Any]:
    """Memory-map a .npy file. Pickled objects are an error."""
    with open(path, "rb") as file:  # np.load goes by the first bytes and would open a zip file as many arrays
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it is not an array")
    array: npt.NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def open_array(folder: Path, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Memory-map folder/name.npy, which must have this dtype and shape and its full length."""
    try:  # copy-on-write: torch asks for writable memory, but nothing writes to it; empty arrays cannot be mapped
        array = open_npy(folder / f"{name}.npy", None if 0 in shape else "c")
    except Exception as error:  # NumPy raises many kinds of errors for a damaged header
        raise damaged(folder, f"{name}.npy cannot be opened ({one_line(error)})") from None
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        expected, got = f"{np.dtype(dtype)} of shape {shape}", f"{array.dtype} of shape {array.shape}"
        raise damaged(folder, f"{name}.npy must be {expected}, got {got}")
    return array


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a complete folder."""
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise damaged(folder, f"{MANIFEST} is missing or is not a JSON object")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, which completes a folder."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def damaged(folder: Path, reason: str) -> ScaleLongError:
    """Build the error for a prepared folder that does not hold what was written."""
    return DataError(f"the prepared data in {folder} is damaged: {reason}; delete the folder to prepare it again")
