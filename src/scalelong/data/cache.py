"""Folders of the cache that are made once: by one process, whole or not at all, and never over a good one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scalelong.errors import ScaleLongError
from scalelong.files import atomic_folder

MANIFEST = "manifest.json"  # the last file to be written
STALE = 24 * 3600  # seconds after which what a killed process left is removed


def build_once(folder: Path, write: Callable[[Path], None], *, force: bool = False) -> None:
    """Fill `folder` by `write`, unless it is there; `force` writes it again and replaces it at the end."""
    if is_built(folder) and not force:
        return
    try:
        with _alone(folder):
            if force or not is_built(folder):  # else another process has just done it
                _build(folder, write)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise ScaleLongError(f"{folder} could not be made ({what}{error.strerror or error})") from error


def _build(folder: Path, write: Callable[[Path], None]) -> None:
    _sweep(folder.parent)
    replaced = folder.exists()  # forced, or without a manifest
    try:
        with atomic_folder(folder) as aside:
            write(aside)
            if replaced:
                _remove(folder)
    except (ScaleLongError, OSError):
        if replaced or not is_built(folder):
            raise  # else another process was faster, where locks do not work


def is_built(folder: Path) -> bool:
    """Whether a folder was completed."""
    return (folder / MANIFEST).is_file()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of a machine work on `folder` while others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder.parent / f".{folder.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {folder}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: the first to finish wins
        yield


def _remove(folder: Path) -> None:
    """Delete a folder in such a way that nobody sees it half deleted."""
    aside = tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent)
    if folder.exists():
        os.rename(folder, Path(aside, "old"))
    shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes left that were killed long ago."""
    for path in folder.glob(".*.part"):
        try:
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue
