"""Arrays in shards of equal length: written by any number of processes, resumed shard by shard, mapped when read."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from scalelong.data.cache import MANIFEST, damaged, lock_folder, open_array, open_npy, write_manifest
from scalelong.errors import DataError, one_line
from scalelong.files import atomic_file
from scalelong.progress import track

Arrays = dict[str, npt.NDArray[Any]]
SHARD = 4096  # rows
POLL = 0.5  # seconds between looks at the shards of other processes


def build_shards(
    folder: Path, count: int, make: Callable[[int, int], Arrays], describe: Callable[[], dict[str, Any]],
    title: str, size: int = SHARD,
) -> None:  # fmt: skip
    """Fill `folder` with `make(first, last)` for rows first … last − 1 of every shard, then the manifest.

    Processes share the work through locks on files: a second one, also on another machine with the same disk, takes
    the shards that nobody has. A killed one leaves its finished shards, from which the same call resumes.
    """
    work = folder.parent / f".{folder.name}.shards"
    try:
        while not (folder / MANIFEST).is_file():
            work.mkdir(parents=True, exist_ok=True)
            missing = [k for k in range(-(-count // size)) if not (work / f"{k:05d}.done").exists()]
            if not missing:
                _finish(folder, work, describe)
                continue
            start = int(os.environ.get("RANK", "0")) * len(missing) // int(os.environ.get("WORLD_SIZE", "1"))
            if not _write_some(work, missing[start:] + missing[:start], count, size, make, title):
                time.sleep(POLL)  # other processes have the rest
    except OSError as error:
        if (folder / MANIFEST).is_file():  # another process finished, and moved the shards under us
            return
        raise DataError(f"could not write {folder} ({error.filename}: {error.strerror or one_line(error)})") from error


def _write_some(work: Path, shards: list[int], count: int, size: int, make: Any, title: str) -> bool:
    """Write the shards that no other process is writing. Returns whether there were any."""
    wrote = False
    for k in track(shards, title, len(shards)):
        done = work / f"{k:05d}.done"
        try:
            with FileLock(work / f"{k:05d}.lock").acquire(timeout=0):
                if done.exists():
                    continue
                for name, rows in make(k * size, min((k + 1) * size, count)).items():
                    with atomic_file(work / f"{name}-{k:05d}.npy") as temporary, open(temporary, "wb") as file:
                        np.save(file, rows, allow_pickle=False)
                done.touch()
                wrote = True
        except Timeout:
            continue
    return wrote


def _finish(folder: Path, work: Path, describe: Callable[[], dict[str, Any]]) -> None:
    with lock_folder(folder):
        if (folder / MANIFEST).is_file():
            return
        for path in [*work.glob("*.lock"), *work.glob("*.done"), *work.glob("*.part")]:
            path.unlink(missing_ok=True)
        write_manifest(work, describe())
        shutil.rmtree(folder, ignore_errors=True)  # left without a manifest
        os.rename(work, folder)


class Shards:
    """Rows of one array, mapped from its shards: `rows(indices)` reads only those."""

    def __init__(
        self, folder: Path, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], size: int = SHARD
    ) -> None:
        self.size, count = size, shape[0]
        lengths = [min(size, count - first) for first in range(0, count, size)]
        stored = [open_array(folder, f"{name}-{k:05d}", dtype, (n, *shape[1:])) for k, n in enumerate(lengths)]
        self._parts = [torch.from_numpy(part).flatten(1) for part in stored]  # (n, …) each

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows (B, …), flat, in the order of `indices`."""
        if len(self._parts) == 1:
            return self._parts[0].index_select(0, indices)
        out = torch.empty(len(indices), self._parts[0].shape[1], dtype=self._parts[0].dtype)
        shard = indices.div(self.size, rounding_mode="floor")
        for k in shard.unique().tolist():
            here = (shard == k).nonzero()[:, 0]
            out[here] = self._parts[k].index_select(0, indices[here] - k * self.size)
        return out


def row_shape(folder: Path, name: str) -> tuple[int, ...]:
    """Return the shape of a row from the first shard, finished or not."""
    for place in (folder, folder.parent / f".{folder.name}.shards"):
        path = place / f"{name}-00000.npy"
        if path.is_file():
            return tuple(open_npy(path).shape[1:])
    raise damaged(folder, f"{name}-00000.npy is missing")
