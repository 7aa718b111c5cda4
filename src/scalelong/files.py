"""Files: atomic writing, hashes, the cache folder, JSON and JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError, invalid

if TYPE_CHECKING:
    from torch import Tensor

FIGURES = (".png", ".svg", ".pdf")  # formats of figures


def cache_dir() -> Path:
    """Return $SCALELONG_CACHE, or `scalelong` in the user's cache folder."""
    chosen = os.environ.get("SCALELONG_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scalelong"


def sha256(path: Path | str) -> str:
    """Return the hexadecimal SHA-256 of a file."""
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
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write to. On success it replaces `path`; on failure it is deleted."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        fsync_path(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: Path | str, *, suffixes: Sequence[str] = (), folder: bool = False) -> None:
    """Raise before the work starts, not after it, if `path` (a folder if `folder`) cannot be written."""
    path = Path(path)
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:  # safetensors cannot open such a path
        raise invalid("path", "valid UTF-8", str(path)) from None
    if suffixes and path.suffix.lower() not in suffixes:
        raise invalid("the file name", f"one that ends in {', '.join(suffixes)}", str(path))
    if path.exists() and path.is_dir() != folder:
        raise invalid("the output path", "a folder" if folder else "a file", str(path))
    parent = next(p for p in (path, *path.absolute().parents) if p.exists() and (folder or p != path))
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise ScaleLongError(f"cannot write {path}: {parent}: {error.strerror}; choose another path") from error


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield an empty temporary folder. On success it is renamed to `path`, which must not exist by then."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            fsync_path(file)
        fsync_path(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        if path.exists():
            raise ScaleLongError(f"{path} already exists and was not overwritten; remove it or choose another path")
        os.rename(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path, *names: str) -> None:
    """Remove temporary files that killed processes left for these names (patterns). Hold the folder's lock."""
    for name in names:
        for temporary in folder.glob(f".{name}.*.part"):
            if temporary.is_dir() and not temporary.is_symlink():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


_UMASK = threading.Lock()  # it can only be read by setting it, which a checkpoint's thread may do at the same time


def _umask() -> int:
    with _UMASK:
        mask = os.umask(0)
        os.umask(mask)
    return mask


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
