"""The user's own files: folders of images, and NumPy files.

A folder has classes by subfolder, and captions in `.txt` files beside the images or in `metadata.jsonl`; Hugging Face's
`imagefolder` has neither `.txt` captions nor a way past a bad file. A `.npy` file holds images; an `.npz` file may hold
`images`, `labels`, `captions` and `class_names`, or splits as in `x_train` and `y_train`. Nothing is unpickled.
"""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.data.cache import open_npy
from scalelong.data.images import MAX_PIXELS, SUFFIXES, common_size
from scalelong.data.records import SPLITS, Example, Options, Reading, canonical_split, choose_split, number_classes
from scalelong.data.registries import unpacked
from scalelong.errors import DataError, one_line
from scalelong.files import parse_json_line

METADATA = "metadata.jsonl"
Rows = dict[str, dict[str, Any]]  # of metadata.jsonl, by file name


def read_folder(root: Path, split: str, options: Options, skip_bad: bool = False) -> Reading:
    """Read the images of one split of a folder, in the order of their names."""
    folders = _split_folders(root)
    part = choose_split(split, folders, options.holdout, str(root))
    base = folders[part.split]
    files = [name for name in _files(base) if not os.path.basename(name).startswith(".")]
    images = sorted(name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES)
    texts = {name.removesuffix(".txt") for name in files if name.endswith(".txt")}
    ignored = len(files) - len(images) - len(texts) - (METADATA in files)
    chosen = [name for name in images if part.includes(name, options.holdout)]
    if not chosen:
        where = f"split {split!r} with holdout {options.holdout}" if options.holdout else f"split {split!r}"
        raise DataError(f"{root} has no images for {where}; supported files: {', '.join(sorted(SUFFIXES))}")
    rows = _metadata(base)
    class_names, labels = _labels(base, images, chosen, rows)
    if rows:
        captioned = any(_captions(rows.get(name, {})) for name in chosen)
    else:
        captioned = any(os.path.splitext(name)[0] in texts for name in chosen)
    names = sorted(set(rows).difference(images)) + chosen  # missing files first: they are errors

    def examples() -> Iterator[Example]:
        for name in names:
            captions = _captions(rows.get(name, {})) if rows else (base / name).with_suffix(".txt")
            yield Example(name, base / name, labels.get(name), captions)

    shape = None
    if skip_bad and options.image_size is None and (size := common_size(base / name for name in chosen)):
        shape = (size[1], size[0], options.channels or 3)  # only exceptions should be skipped
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


def _split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split: subfolders, if all of them have names of splits, or else `root` as `train`."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot read {root} ({error.strerror})") from None
    subfolders = {name for name in names if (root / name).is_dir()}
    folders = {canonical_split(name): root / name for name in subfolders}
    loose = any(Path(name).suffix.lower() in SUFFIXES for name in names if name not in subfolders)
    splits = folders and not loose and set(folders) <= set(SPLITS)
    return folders if splits else {"train": root}


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
        found = f"has images both beside and inside its subfolders ({loose!r}, {nested[0]!r})"
        raise DataError(f"{base} {found}; put every image into the folder of its class, or none")
    names, number = number_classes({name.split("/", 1)[0] for name in images}, str(base))
    return names, {name: number[name.split("/", 1)[0]] for name in chosen}


def _captions(row: dict[str, Any]) -> tuple[str, ...]:
    text = row.get("text", row.get("caption", row.get("captions", ())))
    return (text,) if isinstance(text, str) else tuple(text) if isinstance(text, list) else ()


def _metadata(base: Path) -> Rows:
    """Read metadata.jsonl; no rows without one."""
    path, rows = base / METADATA, Rows()
    if not path.is_file():
        return rows
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        row = parse_json_line(line)
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise DataError(f'{path} line {number} is not a JSON object with a "file_name"')
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise DataError(f"{path} line {number}: file_name must be inside {base}, got {name!r}")
        rows[inside.as_posix()] = row
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


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
        class_names, _ = number_classes(set(labels.tolist()), str(path))
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
