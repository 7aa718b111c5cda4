"""A folder of images: classes by subfolder, captions by `.txt` beside each image or by `metadata.jsonl`."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from scalelong.data.captions import clean_captions
from scalelong.data.images import SUFFIXES, read_image, read_size
from scalelong.data.records import BadExampleError, Example, Options, Reading, shown
from scalelong.data.splits import ALIASES, Part, canonical, choose
from scalelong.errors import ScaleLongError

METADATA = "metadata.jsonl"
MAX_SIDECAR = 1 << 20  # bytes
MAX_CLASSES = 1_000_000


@dataclass(frozen=True, slots=True)
class Item:
    """One image file and what the folder says about it."""

    path: Path
    name: str  # relative to the split's folder, with slashes
    label: int | None = None
    captions: tuple[str, ...] | None = None  # None: in a .txt file, if anywhere


def read_folder(root: Path, split: str, options: Options, *, source: str, skip_bad: bool = False) -> Reading:
    """The images of one split of a folder."""
    base, part = split_folder(root, split, options.holdout)
    files = _walk(base)
    chosen = [name for name in files.images if part.takes(name, options.holdout)]
    if not chosen:
        share = f" with a holdout of {options.holdout}" if options.holdout else ""
        raise ScaleLongError(
            f"{root} holds no images for split {split!r}{share}; these are read: {', '.join(sorted(SUFFIXES))}"
        )
    stated = _metadata(base)
    if stated is None:
        items, classes = _unstated(base, chosen, _class_folders(files.images, base))
        captioned = not files.texts.isdisjoint(os.path.splitext(name)[0] for name in chosen)
    else:
        labelled = any("label" in row for row in stated.values())
        items, classes = _stated(base, chosen, stated, None if labelled else _class_folders(files.images, base))
        captioned = any(item.captions for item in items)
    present = set(files.images)
    absent = [name for name in stated or () if name not in present]
    jobs = itertools.chain(
        (partial(_absent, name, base) for name in absent),
        (partial(_example, item, options, captioned) for item in items),
    )
    shape = _usual_shape(items, options) if skip_bad and options.image_size is None else None
    notes = {"ignored_files": files.others} if files.others else {}
    total = len(absent) + len(items)
    return Reading(jobs, source, total, classes, captioned, shape, decodes=True, notes=notes)


def split_folder(root: Path, split: str, holdout: float) -> tuple[Path, Part]:
    """Where a split's images are: in a subfolder of its name, if all subfolders have such names, else in `root`."""
    try:
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
    except OSError as error:
        raise ScaleLongError(f"{root} cannot be read ({error.strerror})") from None
    inside = {entry.name for entry in entries if os.path.isdir(entry.path)}  # scandir's own is_dir raises for a loop
    folders = {canonical(name): root / name for name in inside}
    loose = any(Path(entry.name).suffix.lower() in SUFFIXES for entry in entries if entry.name not in inside)
    if loose or not folders or not set(folders) <= set(ALIASES):
        folders = {"train": root}
    part = choose(split, folders, holdout, str(root))
    return folders[part.split], part


def listing_sha256(root: Path) -> str:
    """A hash of every file's name, size and time, so that a changed folder is prepared again."""
    digest = hashlib.sha256()
    for folder, files in _folders(root):
        for name in files:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
                line = f"{os.path.relpath(path, root)}\0{status.st_size}\0{status.st_mtime_ns}\n"
            except OSError:
                line = f"{os.path.relpath(path, root)}\0unreadable\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True)
class _Files:
    images: list[str]  # relative to the folder, with slashes, sorted
    texts: set[str]  # the .txt files, without the suffix
    others: int


def _walk(base: Path) -> _Files:
    """Every file below `base`, through links to folders too; hidden ones are passed over."""
    images, texts, others = [], set(), 0
    for folder, names in _folders(base):
        inside = os.path.relpath(folder, base).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        for name in names:
            stem, suffix = os.path.splitext(name)
            if name.startswith("."):
                continue
            if suffix.lower() in SUFFIXES:
                images.append(prefix + name)
            elif suffix == ".txt":
                texts.add(prefix + stem)
            elif name != METADATA:
                others += 1
    return _Files(sorted(images), texts, others)


def _folders(base: Path) -> Iterator[tuple[str, list[str]]]:
    """os.walk that follows links without going round in circles."""
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(base, followlinks=True):
        try:
            status = os.stat(folder)
        except OSError:
            folders.clear()
            continue
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        yield folder, sorted(files)


def _class_folders(files: list[str], base: Path) -> list[str] | None:
    """The classes, when every image is in a subfolder."""
    nested = [name for name in files if "/" in name]
    if not nested:
        return None
    if len(nested) < len(files):
        loose = next(name for name in files if "/" not in name)
        raise ScaleLongError(
            f"{base} has images both beside and inside its subfolders ({shown(loose)}, {shown(nested[0])}): "
            "put every image into the folder of its class, or none"
        )
    return sorted({name.split("/", 1)[0] for name in nested})


def _unstated(base: Path, names: list[str], classes: list[str] | None) -> tuple[list[Item], tuple[str, ...] | None]:
    """Items by the folders alone."""
    if classes is None:
        return [Item(base / name, name) for name in names], None
    number = {name: index for index, name in enumerate(classes)}
    return [Item(base / name, name, number[name.split("/", 1)[0]]) for name in names], tuple(classes)


def _stated(
    base: Path, names: list[str], rows: dict[str, dict[str, object]], classes: list[str] | None
) -> tuple[list[Item], tuple[str, ...] | None]:
    """Items by metadata.jsonl; classes are its labels, or the folders if it has none."""
    items, folder_classes = _unstated(base, names, classes)
    items = [replace(item, captions=_texts(rows.get(item.name, {}))) for item in items]
    given = {item.name: rows[item.name]["label"] for item in items if "label" in rows.get(item.name, {})}
    if classes is not None or not given:
        return items, folder_classes
    path, kinds = base / METADATA, {type(label) for label in given.values()}
    if kinds == {str}:
        known = sorted({str(label) for label in given.values()})
        number: dict[object, int] = {name: index for index, name in enumerate(known)}
    elif kinds == {int}:
        top = max(int(str(label)) for label in given.values())
        if top > MAX_CLASSES:
            raise ScaleLongError(f"{path} has label {top}; labels count up from 0")
        known = [str(index) for index in range(top + 1)]
        number = {label: int(str(label)) for label in given.values()}
    else:
        raise ScaleLongError(f"{path} has labels that are {_types(kinds)}; they must all be names or all numbers")
    items = [replace(item, label=number[given[item.name]] if item.name in given else None) for item in items]
    return items, tuple(known) or ("0",)


def _types(kinds: set[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in kinds))


def _texts(row: dict[str, object]) -> tuple[str, ...]:
    text = row.get("text", row.get("caption", row.get("captions", ())))
    return (text,) if isinstance(text, str) else tuple(text) if isinstance(text, list) else ()


def _usual_shape(items: list[Item], options: Options) -> tuple[int, ...] | None:
    """The shape that most images have, by their headers: what is skipped should be the exception."""
    sizes = Counter(size for size in (read_size(item.path) for item in items) if size is not None)
    if not sizes:
        return None
    (width, height), _ = sizes.most_common(1)[0]
    return height, width, options.channels or 3


def _metadata(base: Path) -> dict[str, dict[str, object]] | None:
    """The rows of metadata.jsonl by file name, or None without one."""
    path = base / METADATA
    if not path.is_file():
        return None
    rows: dict[str, dict[str, object]] = {}
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ScaleLongError(f"{path} line {number} is not JSON") from None
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise ScaleLongError(f'{path} line {number} has no "file_name"')
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise ScaleLongError(f"{path} line {number} names {shown(name)!r}, which is not inside {base}")
        rows[inside.as_posix()] = row
    if not rows:
        raise ScaleLongError(f"{path} is empty")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError:
        raise ScaleLongError(f"{path} is not UTF-8 text") from None


def _absent(name: str, base: Path) -> Example:
    raise BadExampleError(name, f"is named in {base / METADATA} but is not there")


def _example(item: Item, options: Options, captioned: bool) -> Example:
    captions: tuple[str, ...] = ()
    if captioned:
        captions = _sidecar(item) if item.captions is None else item.captions
        captions = clean_captions(captions, item.name)
    return Example(item.name, read_image(item.path, item.name, options), item.label, captions)


def _sidecar(item: Item) -> tuple[str, ...]:
    """The captions beside an image, one a line."""
    path = item.path.with_suffix(".txt")
    if not path.is_file():
        raise BadExampleError(item.name, f"has no caption: {path.name} is not there")
    if path.stat().st_size > MAX_SIDECAR:
        raise BadExampleError(item.name, f"has a caption file of more than {MAX_SIDECAR >> 10} KiB")
    try:
        return tuple(path.read_text(encoding="utf-8-sig").split("\n"))
    except UnicodeDecodeError:
        raise BadExampleError(item.name, f"has a caption that is not UTF-8 text ({path.name})") from None
    except OSError as error:
        raise BadExampleError(item.name, f"has a caption that cannot be read ({error.strerror})") from None
