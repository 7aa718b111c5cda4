"""Archives opened without trust: regular files only, inside the given folder, up to a bounded size."""

from __future__ import annotations

import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from scalelong.data.records import shown
from scalelong.errors import ScaleLongError

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
MAX_BYTES = 512 << 30  # no dataset of images that people train on is larger
MAX_RATIO = 200  # unpacked bytes to packed ones; DEFLATE's best is about 1,000, images stay below 2


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive which `extract` opens."""
    return path.name.lower().endswith(SUFFIXES)


def extract(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar archive into `folder`, or refuse it as a whole."""
    limit = min(MAX_BYTES, max(64 << 20, MAX_RATIO * archive.stat().st_size))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                _write(_zip_members(zipped, archive), archive, folder, limit)
        else:
            with tarfile.open(archive, "r:*") as tar:
                _write(tar_members(tar, archive.name), archive, folder, limit)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the disk, not the archive
        raise ScaleLongError(f"{archive.name} is a broken archive ({' '.join(str(error).split())})") from None
    except ValueError as error:
        if isinstance(error, ScaleLongError):
            raise
        raise ScaleLongError(f"{archive.name} is a broken archive ({error})") from None


def tar_members(tar: tarfile.TarFile, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files of a tar archive in order, each to be read before the next."""
    for member in tar:
        if member.isdir():
            continue
        if not member.isreg():
            raise ScaleLongError(f"{name} holds {shown(member.name)}, which is a link or a device; it is not opened")
        content = tar.extractfile(member)
        assert content is not None
        yield member.name, content


def _zip_members(zipped: zipfile.ZipFile, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for member in zipped.infolist():
        if member.is_dir():
            continue
        mode = member.external_attr >> 16
        if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise ScaleLongError(
                f"{archive.name} holds {shown(member.filename)}, which is a link or a device; it is not opened"
            )
        with zipped.open(member) as content:
            yield member.filename, content


def _write(members: Iterator[tuple[str, IO[bytes]]], archive: Path, folder: Path, limit: int) -> None:
    written = 0
    for name, content in members:
        target = folder / safe_member(name, archive.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise ScaleLongError(f"{archive.name} holds {shown(name)} twice; it is not opened")
        with open(target, "xb") as file:
            while block := content.read(1 << 20):
                written += len(block)
                if written > limit:
                    raise ScaleLongError(f"{archive.name} unpacks to more than {limit >> 20:,} MiB; it is not opened")
                file.write(block)


def safe_member(name: str, archive: str) -> PurePosixPath:
    """A member's path, if it stays inside the folder that it is unpacked to."""
    path = PurePosixPath(name)
    unsafe = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name
    if unsafe or not path.parts:
        raise ScaleLongError(f"{archive} holds {shown(name)!r}, which would be written outside of it; it is not opened")
    return path
