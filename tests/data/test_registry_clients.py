"""Package registries through their clients: downloads are checked, and a failing client means an unavailable source.

The clients here are small stand-ins on PATH; the slow tests run the real ones.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from scalelong.data import registries
from scalelong.data.registries import Package
from scalelong.errors import DataError, SourceUnavailableError
from scalelong.files import sha256


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("package/data.txt")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    return path


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a stand-in for a client first on PATH; it logs its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def install(name: str, script: str) -> Path:
        log = tmp_path / f"{name}.log"
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {log}\n{script}\n')
        (folder / name).chmod(0o755)
        return log

    return install


def downloaded(cache: Path) -> list[str]:
    """What a failed download leaves, its lock aside."""
    return [path.name for path in (cache / "downloads").iterdir() if path.suffix != ".lock"]


def test_a_package_is_fetched_once_checked_and_unpacked(client, package: Path, cache: Path):
    log = client("npm", f"cp {package} .")
    thing = Package("npm", "@scope/thing", "1.0.0", sha256(package))
    assert not thing.ready
    folder = thing.folder()
    assert (folder / "package" / "data.txt").read_bytes() == b"data"
    assert folder.is_relative_to(cache / "downloads")
    assert thing.ready
    assert thing.folder() == folder
    arguments = log.read_text().split("\n")
    assert arguments[:2] == ["pack", "@scope/thing@1.0.0"]
    assert arguments.count("pack") == 1
    assert not any("://" in argument for argument in arguments)  # no registry's address


def test_a_package_with_another_hash_is_not_opened(client, package: Path, cache: Path):
    client("npm", f"cp {package} .")
    wrong = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(SourceUnavailableError, match=rf"thing-1\.0\.0\.tgz.*{sha256(package)}.*{wrong}"):
        Package("npm", "thing", "1.0.0", wrong).folder()
    assert downloaded(cache) == []


def test_two_processes_that_need_a_package_at_once_download_it_once(client, package: Path, cache: Path):
    log = client("npm", f"sleep 1; cp {package} .")
    code = (
        "import sys; from scalelong.data.registries import Package\n"
        f"print(Package('npm', 'thing', '1.0.0', {sha256(package)!r}).folder())"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert answers == [str(cache / "downloads" / "npm-thing-1.0.0")] * 2
    assert log.read_text().split("\n").count("pack") == 1


def test_without_locks_the_files_of_the_faster_process_count(client, package: Path, cache: Path, monkeypatch):
    """On a disk without locks both download; the second finds the folder of the first."""
    monkeypatch.setattr(registries, "lock_folder", lambda folder: nullcontext())
    first = cache / "downloads" / "npm-thing-1.0.0"
    client("npm", f"cp {package} .; mkdir -p {first}/package; echo first > {first}/package/data.txt")
    assert Package("npm", "thing", "1.0.0", sha256(package)).folder() == first
    assert (first / "package" / "data.txt").read_text() == "first\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo noise >&2; echo 'E404 not found' >&2; exit 1", r"npm failed \(E404 not found\)"),
        ("exit 3", r"npm failed \(exit code 3\)"),
        ("true", r"npm downloaded 0 files"),
    ],
)
def test_a_failing_client_is_an_error_with_its_last_line(client, cache: Path, script: str, message: str):
    client("npm", script)
    with pytest.raises(SourceUnavailableError, match=message):
        Package("npm", "thing", "1.0.0", "0" * 64).folder()
    assert downloaded(cache) == []


def test_a_client_that_is_missing_or_hangs_is_unavailable(client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    client("npm", "sleep 30")
    monkeypatch.setattr(registries, "TIMEOUT", 0.2)
    with pytest.raises(SourceUnavailableError, match="npm.* seconds"):
        Package("npm", "thing", "1.0.0", "0" * 64).folder()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SourceUnavailableError, match="npm is not installed"):
        Package("npm", "thing", "1.0.0", "0" * 64).folder()


def test_a_name_never_reaches_a_shell(client, tmp_path: Path):
    client("npm", "exit 1")
    with pytest.raises(SourceUnavailableError):
        Package("npm", f"x; touch {tmp_path / 'ran'} $(touch {tmp_path / 'ran'})", "1", "0" * 64).folder()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def debian(client, tmp_path: Path):
    """Stand-ins for apt-get and dpkg-deb that deliver a tar archive with one member."""

    def deliver(member: tarfile.TarInfo) -> None:
        with tarfile.open(tmp_path / "content.tar", "w") as tar:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        client("apt-get", "touch x_1_all.deb")
        client("dpkg-deb", f"cat {tmp_path / 'content.tar'}")

    return deliver


def test_a_debian_package_is_unpacked_to_where_it_installs(debian, cache: Path):
    member = tarfile.TarInfo("./usr/share/x-of-scalelong/data")
    member.size = 3
    debian(member)
    package = Package("apt", "x", path="/usr/share/x-of-scalelong")
    assert package.folder() == cache / "downloads" / "apt-x" / "usr/share/x-of-scalelong"
    assert [file.name for file in package.folder().iterdir()] == ["data"]


def test_an_installed_debian_package_is_not_downloaded(tmp_path: Path):
    (tmp_path / "installed").mkdir()
    package = Package("apt", "x", path=str(tmp_path / "installed"))
    assert package.ready
    assert package.folder() == tmp_path / "installed"


def test_a_debian_package_with_a_link_is_rejected(debian, cache: Path):
    link = tarfile.TarInfo("./usr/share/x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    debian(link)
    with pytest.raises(DataError, match="usr/share/x"):
        Package("apt", "x", path="/usr/share/x-of-scalelong").folder()
    assert downloaded(cache) == []
