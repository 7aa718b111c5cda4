"""A folder of images: classes by subfolder, captions in `.txt` files beside the images or in `metadata.jsonl`.

Hugging Face's `imagefolder` has neither `.txt` captions nor a way past a bad file, and it needs an extra to install.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from scalelong.data.images import SUFFIXES, read_size
from scalelong.data.records import (
    SPLITS,
    Example,
    Options,
    Part,
    Reading,
    canonical_split,
    choose_split,
    number_classes,
    printable,
)
from scalelong.errors import DataError

METADATA = "metadata.jsonl"
Rows = dict[str, dict[str, Any]]  # of metadata.jsonl, by file name


def read_folder(root: Path, split: str, options: Options, skip_bad: bool = False) -> Reading:
    """Read the images of one split of a folder, in the order of their names."""
    base, part = _split_folder(root, split, options.holdout)
    files = [name for name in _files(base) if not os.path.basename(name).startswith(".")]
    images = sorted(name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES)
    texts = {name.removesuffix(".txt") for name in files if name.endswith(".txt")}
    ignored = len(files) - len(images) - len(texts) - (METADATA in files)
    chosen = [name for name in images if part.includes(name, options.holdout)]
    if not chosen:
        holdout = f" with holdout {options.holdout}" if options.holdout else ""
        kinds = ", ".join(sorted(SUFFIXES))
        raise DataError(f"{root} has no images for split {split!r}{holdout}; supported files: {kinds}")
    rows = _metadata(base)
    class_names, labels = _labels(base, images, chosen, rows or {})
    if rows is None:
        captioned = any(os.path.splitext(name)[0] in texts for name in chosen)
    else:
        captioned = any(_texts(rows.get(name, {})) for name in chosen)
    names = sorted(set(rows or ()).difference(images)) + chosen  # missing files first: they are errors

    def examples() -> Iterator[Example]:
        for name in names:
            captions = (base / name).with_suffix(".txt") if rows is None else _texts(rows.get(name, {}))
            yield Example(name, base / name, labels.get(name), captions)

    shape = _common_shape(base, chosen, options) if skip_bad and options.image_size is None else None
    extra = {"ignored_files": ignored} if ignored else {}
    return Reading(examples(), len(names), class_names, captioned, shape, extra=extra)


def listing_sha256(root: Path) -> str:
    """Return a hash of the name, size and time of every file, so that a changed folder is prepared again."""
    digest = hashlib.sha256()
    for name in _files(root):
        try:
            status = os.stat(root / name)
            line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
        except OSError:
            line = f"{name}\0unreadable\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _files(base: Path) -> Iterator[str]:
    """Yield the names of all files in visible folders, following links without going round in circles."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(base, followlinks=True):
        if os.path.realpath(folder) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        inside = os.path.relpath(folder, base).replace(os.sep, "/")
        yield from (name if inside == "." else f"{inside}/{name}" for name in sorted(files))


def _split_folder(root: Path, split: str, holdout: float) -> tuple[Path, Part]:
    """Return the folder of a split: a subfolder, if all subfolders have names of splits, or else `root`."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot read {root} ({error.strerror})") from None
    subfolders = {name for name in names if (root / name).is_dir()}
    folders = {canonical_split(name): root / name for name in subfolders}
    loose = any(Path(name).suffix.lower() in SUFFIXES for name in names if name not in subfolders)
    if loose or not folders or not set(folders) <= set(SPLITS):
        folders = {"train": root}
    part = choose_split(split, folders, holdout, str(root))
    return folders[part.split], part


def _labels(
    base: Path, images: list[str], chosen: list[str], rows: Rows
) -> tuple[tuple[str, ...] | None, dict[str, int]]:
    """Return class names and the label of each image: from metadata.jsonl if it has labels, or else by subfolder."""
    if any("label" in row for row in rows.values()):
        stated = {name: rows[name]["label"] for name in chosen if "label" in rows.get(name, {})}
        if not stated:
            return None, {}
        names, number = number_classes(list(stated.values()), str(base / METADATA))
        return names, {name: number[label] for name, label in stated.items()}
    nested = [name for name in images if "/" in name]
    if not nested:
        return None, {}
    if len(nested) < len(images):
        loose = next(name for name in images if "/" not in name)
        raise DataError(
            f"{base} has images both beside and inside its subfolders ({printable(loose)}, {printable(nested[0])}); "
            "put every image into the folder of its class, or none"
        )
    names, number = number_classes({name.split("/", 1)[0] for name in images}, str(base))
    return names, {name: number[name.split("/", 1)[0]] for name in chosen}


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    text = row.get("text", row.get("caption", row.get("captions", ())))
    return (text,) if isinstance(text, str) else tuple(text) if isinstance(text, list) else ()


def _common_shape(base: Path, names: list[str], options: Options) -> tuple[int, ...] | None:
    """Return the most common shape according to the files' headers: only exceptions should be skipped."""
    sizes = Counter(size for size in (read_size(base / name) for name in names) if size is not None)
    if not sizes:
        return None
    (width, height), _ = sizes.most_common(1)[0]
    return height, width, options.channels or 3


def _metadata(base: Path) -> Rows | None:
    """Read metadata.jsonl; None without one."""
    path = base / METADATA
    if not path.is_file():
        return None
    rows: Rows = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path} line {number} is not JSON") from None
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise DataError(f'{path} line {number} has no "file_name"')
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise DataError(f"{path} line {number}: file_name must be inside {base}, got {printable(name)!r}")
        rows[inside.as_posix()] = row
    if not rows:
        raise DataError(f"{path} is empty")
    return rows
