"""The user's own files: folders of images, and NumPy files.

A folder has classes by subfolder, captions in `.txt` files beside the images, and labels or captions in
`metadata.jsonl` or `metadata.csv` as in Hugging Face's `imagefolder`, which has no way past a bad file. A `.npy` file
holds images; an `.npz` file may hold `images`, `labels`, `captions` and `class_names`, or splits as in `x_train` and
`y_train`. Nothing is unpickled.
"""

import csv
import hashlib
import io
import math
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.cache import open_npy
from scalelong.data.images import MAX_PIXELS, SUFFIXES, common_size
from scalelong.data.records import SPLITS, Example, Options, Reading, canonical_split, choose_split, number_classes
from scalelong.data.registries import unpacked
from scalelong.errors import DataError, one_line, unknown
from scalelong.files import parse_json_line

METADATA = ("metadata.jsonl", "metadata.csv")  # as in Hugging Face's `imagefolder`
TEXTS = ("text", "caption", "captions")
Rows = dict[str, dict[str, Any]]  # of metadata, by the name of the image


@dataclass(frozen=True)
class _Split:
    """The files of one split, by their names inside its folder."""

    base: Path
    files: list[str]
    images: list[str]
    rows: Rows


def read_folder(root: Path, split: str, options: Options, skip_bad: bool = False, title: str = "") -> Reading:
    """Read the images of one split of a folder, in the order of their names. `title` is its name in messages."""
    title = title or str(root)
    root = _unwrapped(root)
    folders = _split_folders(root)
    part = choose_split(split, folders, options.holdout, title)
    splits = {name: _list(root, folder) for name, folder in folders.items()}
    own = splits[part.split]
    chosen = [name for name in own.images if part.includes(name, options.holdout)]
    if not chosen:
        where = f"split {split!r} with holdout {options.holdout}" if options.holdout else f"split {split!r}"
        raise DataError(f"{title} has no images for {where}; supported files: {', '.join(sorted(SUFFIXES))}")
    class_names, labels = _labels(root, splits, part.split, options.label_column)
    texts = {name.removesuffix(".txt") for name in own.files if name.endswith(".txt")}
    captions = _captions(own.rows, options.caption_column)
    in_files = not captions and any(os.path.splitext(name)[0] in texts for name in chosen)
    names = sorted(set(own.rows).difference(own.images)) + chosen  # missing files first: they are errors

    def examples() -> Iterator[Example]:
        for name in names:
            text = (own.base / name).with_suffix(".txt") if in_files else captions.get(name, ())
            yield Example(name, own.base / name, labels.get(name), text)

    shape = None
    if skip_bad and options.image_size is None and (size := common_size(own.base / name for name in chosen)):
        shape = (size[1], size[0], options.channels or 3)  # only exceptions should be skipped
    tables = sum(os.path.basename(name) in METADATA for name in own.files)
    ignored = len(own.files) - len(own.images) - len(texts) - tables
    captioned = in_files or any(name in captions for name in chosen)
    return Reading(
        examples(), len(names), class_names, captioned, shape, extra={"ignored_files": ignored} if ignored else {}
    )


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
    """Yield the names of all files in visible folders, following links without going round in circles.

    Runs and comparisons inside the folder, with the samples that they made, are not data.
    """
    seen: set[str] = set()
    for folder, folders, files in os.walk(base, followlinks=True):
        if os.path.realpath(folder) in seen or (folder != str(base) and _is_product({*folders, *files})):
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        inside = os.path.relpath(folder, base).replace(os.sep, "/")
        yield from (name if inside == "." else f"{inside}/{name}" for name in sorted(files))


def _is_product(names: set[str]) -> bool:
    """Whether a folder with these names is a run or a comparison."""
    return "comparison.json" in names or ("config.json" in names and bool(names & {"metrics.jsonl", "checkpoints"}))


def _split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split: subfolders, if all of them have names of splits, or else `root` as `train`."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".") and name != "__MACOSX"]
    except OSError as error:
        raise DataError(f"cannot read {root} ({error.strerror})") from None
    subfolders = {name for name in names if (root / name).is_dir() and _holds_data(root / name)}
    folders = {canonical_split(name): root / name for name in subfolders}
    loose = any(Path(name).suffix.lower() in SUFFIXES for name in names if name not in subfolders)
    splits = folders and not loose and set(folders) <= set(SPLITS)
    return folders if splits else {"train": root}


def _holds_data(folder: Path) -> bool:
    """Whether a folder is that of a split or of images; a folder of runs is not."""
    named = canonical_split(folder.name) in SPLITS
    return named or any(os.path.splitext(name)[1].lower() in SUFFIXES for name in _files(folder))


def _unwrapped(root: Path) -> Path:
    """Skip folders that hold nothing but one folder: a folder around everything is not a class."""
    seen: set[str] = set()
    while os.path.realpath(root) not in seen:
        seen.add(os.path.realpath(root))
        try:
            entries = [entry for entry in root.iterdir() if not entry.name.startswith(".") and entry.name != "__MACOSX"]
        except OSError as error:
            raise DataError(f"cannot read {root} ({error.strerror})") from None
        folders = [entry for entry in entries if entry.is_dir()]
        content = any(entry.suffix.lower() in SUFFIXES or entry.name in METADATA for entry in entries)
        if len(folders) != 1 or content or canonical_split(folders[0].name) in SPLITS:
            break
        root = folders[0]
    return root


def _list(root: Path, base: Path) -> _Split:
    files = [name for name in _files(base) if not os.path.basename(name).startswith(".")]
    rows = _metadata(base, [name for name in files if os.path.basename(name) in METADATA])
    if base != root:  # metadata beside the folders of the splits describes the images of all of them
        for name, row in _metadata(root, [name for name in METADATA if (root / name).is_file()]).items():
            if name.startswith(f"{base.name}/"):
                rows.setdefault(name.removeprefix(f"{base.name}/"), row)
    return _Split(base, files, sorted(name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES), rows)


def _labels(
    root: Path, splits: dict[str, _Split], split: str, column: str | None
) -> tuple[tuple[str, ...] | None, dict[str, int]]:
    """Return class names, equal for all splits, and the label of each image: from metadata, or else by subfolder."""
    column = _column(splits[split].rows, column, ("label",))
    if column is not None:
        rows = {name: each.rows for name, each in splits.items()}
        stated = {
            name: {image: row[column] for image, row in rows[name].items() if row.get(column) not in (None, "")}
            for name in rows
        }
        labels = [label for each in stated.values() for label in each.values()]
        if not labels:
            return None, {}
        names, number = number_classes(labels, f"{root}, column {column!r}")
        return names, {image: number[label] for image, label in stated[split].items()}
    images = [(name, image) for name, each in splits.items() for image in each.images]
    folders = {os.path.dirname(image) for _, image in images}
    around = posixpath.commonpath(folders) if "" not in folders else ""  # a folder around all images is not a class
    inner = {(name, image): image[len(around) :].lstrip("/") for name, image in images}
    nested = [image for image in inner.values() if "/" in image]
    if not nested or (len(nested) < len(inner) and splits[split].rows):
        return None, {}
    if len(nested) < len(inner):
        loose = next(image for image in inner.values() if "/" not in image)
        found = f"has images both beside and inside its subfolders ({loose!r}, {nested[0]!r})"
        raise DataError(f"{root / around} {found}; put every image into the folder of its class, or none")
    names, number = number_classes({image.split("/", 1)[0] for image in inner.values()}, str(root))
    return names, {image: number[inner[split, image].split("/", 1)[0]] for image in splits[split].images}


def _captions(rows: Rows, column: str | None) -> dict[str, tuple[str, ...]]:
    """Return the captions of each image that has any: text, or a list of texts."""
    column = _column(rows, column, TEXTS)
    texts = {name: row.get(column) for name, row in rows.items()} if column is not None else {}
    return {
        name: (text,) if isinstance(text, str) else tuple(text)
        for name, text in texts.items()
        if isinstance(text, (str, list))
    }


def _column(rows: Rows, chosen: str | None, usual: tuple[str, ...]) -> str | None:
    """Return the chosen column of metadata, or the first of the usual ones."""
    columns = {column: None for row in rows.values() for column in row}
    if chosen is not None and chosen not in columns:
        raise unknown("column of metadata", chosen, columns)
    return chosen or next((column for column in usual if column in columns), None)


def _metadata(base: Path, names: list[str]) -> Rows:
    """Read metadata files. A `file_name` is relative to the folder of its file."""
    rows = Rows()
    for folder in sorted({os.path.dirname(name) for name in names}):
        tables = [name for name in names if os.path.dirname(name) == folder]
        if len(tables) > 1:
            raise DataError(f"{base / folder} has both {' and '.join(METADATA)}; remove one of them")
        path = base / tables[0]
        table = list((_csv_rows if path.suffix == ".csv" else _json_rows)(path))
        if not table:
            raise DataError(f"{path} is empty; put one row with a file_name per image into it, or remove it")
        for line, row in table:
            name = row.get("file_name") if isinstance(row, dict) else None
            if not isinstance(name, str) or not name:
                raise DataError(f"{path} line {line} must have a file_name, got {one_line(str(row))[:80]}")
            inside = PurePosixPath(name)
            if inside.is_absolute() or ".." in inside.parts:
                raise DataError(f"{path} line {line}: file_name must be inside {path.parent}, got {name!r}")
            rows[(PurePosixPath(folder) / inside).as_posix()] = row
    return rows


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            yield number, parse_json_line(line)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV file. A column of integers holds class numbers, as pandas and `imagefolder` read it."""
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
        rows: list[tuple[int, dict[str, Any]]] = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8 ({one_line(error)})") from None
    for line, row in rows:
        if None in row:
            raise DataError(f"{path} line {line} has more values than the header has columns; put commas in quotes")
    for column in reader.fieldnames or ():
        if column not in ("file_name", *TEXTS) and all(
            re.fullmatch(r"-?\d{1,18}", row[column] or "") for _, row in rows
        ):
            for _, row in rows:
                row[column] = int(row[column])
    yield from rows


IMAGES = ("images", "image", "x", "data", "arr_0")
LABELS = ("labels", "label", "y", "arr_1")
CAPTIONS = ("captions", "caption", "text")
Array = npt.NDArray[Any]


def open_arrays(path: Path, stack: ExitStack) -> dict[str, Array]:
    """Map the array of a .npy file (as `images`), or those of an .npz file, which is unpacked until `stack` closes."""
    if path.suffix.lower() == ".npy":
        files = {"images": path}
    else:
        files = {file.stem: file for file in sorted(unpacked(path, stack).glob("*.npy"))}
    arrays = {}
    for name, file in files.items():
        try:
            arrays[name] = open_npy(file)
        except Exception as error:  # NumPy raises many kinds of errors for a damaged header
            raise DataError(f"{path.name}: array {name} cannot be opened ({one_line(error)})") from None
    return arrays


def read_numpy(path: Path, split: str, options: Options, stack: ExitStack) -> Reading:
    """Read one split of a NumPy file."""
    arrays = open_arrays(path, stack)
    named = {name: key for name, aliases in SPLITS.items() if (key := _find(arrays, IMAGES, aliases)) is not None}
    splits: dict[str, str | None] = {**named} or {"train": _find(arrays, IMAGES)}
    part = choose_split(split, splits, options.holdout, str(path))
    key, aliases = splits[part.split], SPLITS[part.split] if named else ()
    if key is None:
        found = ", ".join(arrays) or "no arrays"
        raise DataError(f"{path}: expected an array of images named {', '.join(IMAGES)}, got {found}")
    images, shape = arrays[key], arrays[key].shape
    layout = len(shape) == 3 or (len(shape) == 4 and (shape[3] in (1, 3) or shape[1] in (1, 3)))
    if images.dtype != np.uint8 or not layout or 0 in shape or math.prod(shape[1:]) > 3 * MAX_PIXELS:
        expected = f"uint8 (n, h, w), (n, h, w, c) or (n, c, h, w) with c of 1 or 3 and up to {MAX_PIXELS:,} pixels"
        raise _wrong(path, key, expected, images)
    count, labels, class_names, captions = len(images), None, None, None
    if (key := _find(arrays, LABELS, aliases)) is not None:
        stored = arrays[key]
        if stored.dtype.kind not in "iu" or stored.shape not in ((count,), (count, 1)):
            raise _wrong(path, key, f"{count} integers", stored)
        labels = stored.reshape(-1).astype(np.int64)
        others = [_find(arrays, LABELS, SPLITS[name]) for name in named]
        of_all = [labels, *(arrays[other].reshape(-1) for other in others if other is not None and other != key)]
        class_names, _ = number_classes({int(label) for each in of_all for label in np.unique(each)}, str(path))
        if "class_names" in arrays:
            class_names = tuple(_texts(path, "class_names", arrays).reshape(-1).tolist())
    if (key := _find(arrays, CAPTIONS)) is not None and len(splits) == 1:
        captions = _texts(path, key, arrays)
        if captions.ndim not in (1, 2) or len(captions) != count:
            raise _wrong(path, key, f"text of shape ({count},) or ({count}, k)", captions)
    rows = [row for row in range(count) if part.includes(f"row {row}", options.holdout)]

    def examples() -> Iterator[Example]:
        for row in rows:
            pixels = images[row]
            if pixels.ndim == 2:
                pixels = pixels[:, :, None]
            elif pixels.shape[2] not in (1, 3):
                pixels = pixels.transpose(1, 2, 0)  # channels last
            label = None if labels is None else int(labels[row])
            texts = () if captions is None else tuple(str(text) for text in np.atleast_1d(captions[row]))
            yield Example(f"{path.name} row {row}", pixels, label, texts)

    return Reading(examples(), len(rows), class_names, captions is not None)


def _find(arrays: dict[str, Array], stems: tuple[str, ...], aliases: tuple[str, ...] = ()) -> str | None:
    """Return the first name in `arrays`: a stem, or a stem with a split's alias as in `x_train` or `train_labels`."""
    forms = (form for stem in stems for alias in aliases for form in (f"{stem}_{alias}", f"{alias}_{stem}"))
    return next((form for form in (forms if aliases else stems) if form in arrays), None)


def _texts(path: Path, key: str, arrays: dict[str, Array]) -> npt.NDArray[np.str_]:
    array = arrays[key]
    if array.dtype.kind not in "US":
        raise _wrong(path, key, "text", array)
    try:
        return array if array.dtype.kind == "U" else np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path.name}: {key} must be UTF-8 text") from None


def _wrong(path: Path, key: str, expected: str, array: Array) -> DataError:
    return DataError(f"{path.name}: {key} must be {expected}, got {array.dtype} of shape {array.shape}")
