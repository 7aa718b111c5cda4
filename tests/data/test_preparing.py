"""Preparing: once, whole or not at all, by one process of many, with clear errors when the disk fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pictures import picture

from scalelong.data import ImageData, load, prepared
from scalelong.data import cache as cache_module
from scalelong.errors import DataError

SERVER = """
import os, sys, scalelong, scalelong.data.prepare
BEFORE
for line in sys.stdin:
    if line == "wait\\n":
        print(os.wait()[1], flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        try:
            print(scalelong.data.load(sys.argv[1]).fingerprint, file=sys.stderr, flush=True)
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    print(pid, flush=True)
"""


class Workers:
    """A process that imports the package once and forks workers, each of which loads the source."""

    def __init__(self, source: Path, cache: Path, before: str = "") -> None:
        command = [sys.executable, "-c", SERVER.replace("BEFORE", before), str(source)]
        environment = os.environ | {"SCALELONG_CACHE": str(cache)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self, word: str) -> int:
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> list[str]:
        """What the workers said, line by line."""
        return self.process.communicate()[1].split("\n")[:-1]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (20_000, 8, 8, 3), dtype=np.uint8)
    np.save(tmp_path / "rows.npy", images)
    return tmp_path / "rows.npy"


def test_a_second_load_writes_nothing(flat_folder: Path):
    first = load(flat_folder)
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    second = load(flat_folder)
    assert second.folder == first.folder
    assert (second.folder / "manifest.json").stat().st_mtime_ns == stamp


def test_the_manifest_records_source_shape_options_and_versions(flat_folder: Path):
    manifest = load(flat_folder, image_size=4).manifest
    assert manifest["source"] == str(flat_folder)
    assert manifest["shape"] == [4, 4, 4, 3]
    assert manifest["options"] == {"image_size": 4}
    assert set(manifest["versions"]) == {"scalelong", "numpy", "pillow"}
    assert manifest["skipped"] == []


def test_each_set_of_options_has_its_own_folder(flat_folder: Path):
    folders = {load(flat_folder).folder, load(flat_folder, image_size=4).folder, load(flat_folder, channels=1).folder}
    assert len(folders) == 3
    assert len(prepared()) == 3


def test_force_writes_again_and_leaves_open_data_readable(flat_folder: Path):
    before = load(flat_folder)
    expected = before.batch([0, 1, 2, 3])
    path = before.folder / "images.npy"
    number = path.stat().st_ino
    after = load(flat_folder, force=True)
    assert path.stat().st_ino != number
    assert (before.batch([0, 1, 2, 3]) == expected).all()
    assert (after.batch([0, 1, 2, 3]) == expected).all()
    assert [entry.name for entry in before.folder.parent.iterdir() if entry.name.endswith(".part")] == []


def test_a_forced_preparation_that_fails_keeps_the_old_one(tmp_path: Path):
    """The folder's listing is the same, but a file cannot be read any more."""
    folder = tmp_path / "set"
    folder.mkdir()
    picture(0).save(folder / "0.png")
    data = load(folder)
    status = (folder / "0.png").stat()
    (folder / "0.png").write_bytes(bytes(status.st_size))
    os.utime(folder / "0.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"0\.png"):
        load(folder, force=True)
    assert len(ImageData(data.folder)) == 1


def test_an_error_leaves_nothing_behind(flat_folder: Path, cache: Path):
    (flat_folder / "3.png").write_bytes(b"")
    with pytest.raises(DataError):
        load(flat_folder)
    left = [path.name for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert left == []


def test_a_folder_without_a_manifest_is_prepared_again(flat_folder: Path):
    data = load(flat_folder)
    (data.folder / "manifest.json").unlink()
    assert len(load(flat_folder)) == 4


def test_a_killed_process_leaves_no_half_set(rows: Path, cache: Path):
    """SIGKILL while the images are being written; the next process finds nothing, and prepares the whole."""
    workers = Workers(rows, cache)
    unfinished = 0
    for kill in range(8):
        pid = workers.ask("start")
        until = time.monotonic() + (0.03 * kill if kill < 6 else 60)
        while time.monotonic() < until and not (kill >= 6 and list(cache.glob("data/*/.train.*.part/images.npy"))):
            time.sleep(0.001)  # the last two wait for the writing, however slow the machine is
        os.kill(pid, signal.SIGKILL)
        workers.ask("wait")
        unfinished += len(list(cache.glob("data/*/.train.*.part/images.npy")))
        for part in cache.glob("data/*/.train.*.part"):
            shutil.rmtree(part)
        for manifest in cache.glob("data/*/train/manifest.json"):  # it was faster than the signal
            ImageData(manifest.parent).verify()
            shutil.rmtree(manifest.parent)
    workers.end()
    assert unfinished > 0
    data = load(rows)
    data.verify()
    assert len(data) == 20_000


NO_LOCKS = """
import fcntl
def refuse(*arguments): raise OSError(37, "no locks here")
fcntl.flock = refuse
"""


IMPATIENT = """
from scalelong.data import cache
cache.PATIENCE = 0
"""


@pytest.mark.parametrize("before", [IMPATIENT, NO_LOCKS], ids=["with locks", "without locks"])
def test_processes_that_start_at_once_get_the_same_whole_set(rows: Path, cache: Path, before: str):
    """With locks one works and the others wait; without, all work and the first to finish wins."""
    workers = Workers(rows, cache, before)
    for _ in range(3):
        workers.ask("start")
    assert [workers.ask("wait") for _ in range(3)] == [0, 0, 0]
    said = workers.end()
    fingerprints = [line for line in said if len(line) == 64]
    assert len(fingerprints) == 3
    assert set(fingerprints) == {load(rows).fingerprint}
    load(rows).verify()
    assert not list(cache.rglob("*.part"))
    assert any("waiting for another process" in line for line in said) == (before == IMPATIENT)


def test_old_leftovers_are_removed(flat_folder: Path):
    parent = load(flat_folder).folder.parent
    old, new = parent / ".train.old.part", parent / ".train.new.part"
    for path in (old, new):
        path.mkdir()
    past = time.time() - 2 * cache_module.STALE
    os.utime(old, (past, past))
    load(flat_folder, force=True)
    assert not old.exists()
    assert new.exists()


def test_a_disk_that_is_too_small_is_an_error_before_writing(rows: Path, monkeypatch: pytest.MonkeyPatch):
    free = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(DataError, match=r"20,000 images.*SCALELONG_CACHE"):
        load(rows)


def test_a_cache_that_is_a_file_is_an_error(flat_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(DataError, match=r"occupied.*(File exists|Not a directory)"):
        load(flat_folder)


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""


def test_a_full_disk_is_an_error_and_leaves_nothing(rows: Path, cache: Path):
    """No file may grow beyond 1 MiB, where the images need 4."""
    workers = Workers(rows, cache, FULL_DISK)
    workers.ask("start")
    assert workers.ask("wait") != 0
    (message,) = workers.end()
    assert "/train" in message
    assert "File too large" in message
    assert [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_many_workers_decode_in_order(tmp_path: Path):
    folder = tmp_path / "many"
    folder.mkdir()
    for index in range(200):
        picture(index, (3, 3)).save(folder / f"{index:03d}.png")
    assert np.array_equal(load(folder).images, [np.asarray(picture(index, (3, 3))) for index in range(200)])
