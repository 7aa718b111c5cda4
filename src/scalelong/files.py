"""Files that are whole or absent: atomic writing, hashes, and where the cache is."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError

if TYPE_CHECKING:
    from torch import Tensor

FIGURES = (".png", ".svg", ".pdf")  # what figures are written as


def cache_dir() -> Path:
    """`SCALELONG_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("SCALELONG_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scalelong"


def sha256(path: Path | str) -> str:
    """The hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state dict: names, dtypes, shapes and values, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Push a file's or a folder's contents to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Give a path to write to; on success it takes the place of `path`, on failure nothing is left."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        fsync_path(aside)
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, path)
        fsync_path(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def check_target(path: Path | str, *, suffixes: Sequence[str] = (), folder: bool = False) -> None:
    """Say at once, not after the work is done, that nothing can be written to `path` (a folder, where `folder`)."""
    path = Path(path)
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:  # safetensors, for one, cannot open it
        raise ScaleLongError(f"{str(path)!a} is not a name in UTF-8; give another") from None
    if suffixes and path.suffix.lower() not in suffixes:
        raise ScaleLongError(f"{path} ends in {path.suffix!r}; these are written: {', '.join(suffixes)}")
    if path.exists() and path.is_dir() != folder:
        raise ScaleLongError(f"{path} is a file; give a folder" if folder else f"{path} is a folder; give a file")
    above = next(place for place in (path, *path.absolute().parents) if place.exists() and (folder or place != path))
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise ScaleLongError(f"{path} cannot be written: {above}: {error.strerror}") from error


def write_text(path: Path | str, text: str) -> None:
    """Write a text file whole or not at all."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Give an empty folder to fill; on success it is renamed to `path`, which must not exist by then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield aside
        for file in aside.rglob("*"):
            fsync_path(file)
        fsync_path(aside)
        os.chmod(aside, 0o777 & ~_umask())
        if path.exists():
            raise ScaleLongError(f"{path} exists already; it was not overwritten")
        os.rename(aside, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path, *names: str) -> None:
    """Remove what a killed process left aside of these names (patterns). For whoever holds the folder's lock."""
    for name in names:
        for aside in folder.glob(f".{name}.*.part"):
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ------------------------------------------------------------------------------------------------- JSON

BLOCK = 1 << 18  # bytes parsed in one call: one call for many lines is twice as fast as one call per line


def read_json(path: Path | str) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is absent, damaged or not an object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_line_blocks(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the objects of a JSON-lines file in order, many at a time. Skips lines that are not whole objects."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        while text := file.read(BLOCK) + file.readline():
            if rows := _json_rows(text):
                yield rows


def parse_json_line(line: bytes) -> Any:
    """Return the value of one line, or None if it is torn or not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _json_rows(text: bytes) -> list[dict[str, Any]]:
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    try:
        rows = json.loads(b"[" + text.removesuffix(b"\n").replace(b"\n", b",") + b"]")
        if len(rows) == lines and set(map(type, rows)) == {dict}:
            return rows
    except (ValueError, RecursionError):
        pass
    return [row for line in text.split(b"\n") if isinstance(row := parse_json_line(line), dict)]
