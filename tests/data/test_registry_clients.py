"""Package registries through their clients: what arrives is checked, and a client that fails is a reason to go on.

The clients here are small stand-ins on PATH; the real ones are run by the tests marked slow.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from scalelong.data import registries
from scalelong.data.records import SourceUnavailableError
from scalelong.data.registries import debian_package, npm_package
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
    """Put a stand-in for a client first on PATH; it notes its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def install(name: str, script: str) -> Path:
        log = tmp_path / f"{name}.log"
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {log}\n{script}\n')
        (folder / name).chmod(0o755)
        return log

    return install


def test_a_package_is_fetched_once_checked_and_unpacked(client, package: Path, cache: Path):
    log = client("npm", f"cp {package} .")
    folder = npm_package("@scope/thing", "1.0.0", sha256(package))
    assert (folder / "package" / "data.txt").read_bytes() == b"data"
    assert folder.is_relative_to(cache / "downloads")
    assert npm_package("@scope/thing", "1.0.0", sha256(package)) == folder
    arguments = log.read_text().split("\n")
    assert arguments[:2] == ["pack", "@scope/thing@1.0.0"]
    assert arguments.count("pack") == 1
    assert not any("://" in argument for argument in arguments)  # no registry's address


def test_another_hash_is_not_opened(client, package: Path, cache: Path):
    client("npm", f"cp {package} .")
    wrong = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(SourceUnavailableError, match=r"thing-1\.0\.0\.tgz has SHA-256 .*, not the pinned"):
        npm_package("thing", "1.0.0", wrong)
    assert not list((cache / "downloads").iterdir())


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo noise >&2; echo 'E404 not found' >&2; exit 1", r"npm failed \(E404 not found\)"),
        ("exit 3", r"npm failed \(3\)"),
        ("true", r"left 0 files \*\.tgz"),
    ],
)
def test_a_client_that_fails_says_why(client, cache: Path, script: str, message: str):
    client("npm", script)
    with pytest.raises(SourceUnavailableError, match=message):
        npm_package("thing", "1.0.0", "0" * 64)
    assert not list((cache / "downloads").iterdir())


def test_a_client_that_is_absent_or_hangs_is_unavailable(client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    client("npm", "sleep 30")
    monkeypatch.setattr(registries, "TIMEOUT", 0.2)
    with pytest.raises(SourceUnavailableError, match="npm took more than"):
        npm_package("thing", "1.0.0", "0" * 64)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(SourceUnavailableError, match="npm is not installed"):
        npm_package("thing", "1.0.0", "0" * 64)


def test_a_name_is_never_read_by_a_shell(client, tmp_path: Path):
    client("npm", "exit 1")
    with pytest.raises(SourceUnavailableError):
        npm_package(f"x; touch {tmp_path / 'ran'} $(touch {tmp_path / 'ran'})", "1", "0" * 64)
    assert not (tmp_path / "ran").exists()


def test_a_debian_package_with_a_link_is_refused(client, tmp_path: Path, cache: Path):
    content = tmp_path / "content.tar"
    with tarfile.open(content, "w") as tar:
        link = tarfile.TarInfo("./usr/share/x")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    client("apt-get", "touch x_1_all.deb")
    client("dpkg-deb", f"cat {content}")
    with pytest.raises(ValueError, match="is a link or a device"):
        debian_package("x")
    assert not list((cache / "downloads").iterdir())
