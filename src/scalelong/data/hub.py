"""Hugging Face datasets, by name or from a local folder (`save_to_disk`, Parquet or Arrow files)."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scalelong.data.captions import clean_captions
from scalelong.data.images import read_image
from scalelong.data.records import BadExampleError, Example, Options, Pixels, Reading, SourceUnavailableError
from scalelong.data.splits import ALIASES, Part, canonical, choose
from scalelong.errors import ScaleLongError, require, unknown

LABELS = ("label", "labels", "fine_label", "class")
CAPTIONS = ("captions", "caption", "text", "sentences")
TABLES = (".parquet", ".arrow")
MAX_CLASSES = 1_000_000


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face dataset rather than images."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return True
    return any(path.suffix in TABLES for path in itertools.chain(folder.glob("*"), folder.glob("*/*")))


def read_hub(
    name: str,
    split: str,
    options: Options,
    *,
    source: str,
    group: str | None = None,
    decode: Callable[[Path | bytes, str, Options], Pixels] = read_image,
) -> Reading:
    """One split of a dataset; consecutive rows with the same value of column `group` are one image's captions."""
    require("datasets", "datasets", "Hugging Face datasets")
    folder = Path(name).expanduser()
    local = folder.is_dir()
    rows, part = _open_folder(folder, split, options) if local else _open_hub(name, split, options)
    features = rows.features
    if features is None:
        raise ScaleLongError(f"{source} does not state its columns")
    image = _column(features, options.image_column, _is_image, source, "image")
    assert image is not None
    label = _column(features, options.label_column, _is_label, source, "label")
    caption = _column(features, options.caption_column, _is_caption, source, "caption")
    classes, numbers = (None, None) if label is None else _classes(rows, label, source)
    columns = _Columns(image, label, caption, numbers, local)
    import datasets

    if _is_image(image, features[image]) and not isinstance(features[image], dict):
        rows = rows.cast_column(image, datasets.Image(decode=False))

    def jobs() -> Iterator[partial[Example]]:
        for index, run in _runs(rows, group):
            title = f"{source} row {index}"
            if part.takes(f"row {index}", options.holdout):
                yield partial(_example, title, run, columns, options, decode)

    total = len(rows) if hasattr(rows, "__len__") and group is None and part.held_out is None else None
    return Reading(jobs(), source, total, classes, caption is not None, decodes=True)


def _open_folder(folder: Path, split: str, options: Options) -> tuple[Any, Part]:
    import datasets

    where = str(folder)
    try:
        if (folder / "dataset_dict.json").is_file():
            names = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            found = {canonical(name): folder / os.path.basename(name) for name in names}
            part = choose(split, found, options.holdout, where)
            return datasets.load_from_disk(str(found[part.split])), part
        if (folder / "state.json").is_file():
            part = choose(split, ["train"], options.holdout, where)
            return datasets.load_from_disk(where), part
        tables = _tables(folder)
        part = choose(split, tables, options.holdout, where)
        files = tables[part.split]
        kind = {path.suffix[1:] for path in files}
        if len(kind) != 1:
            raise ScaleLongError(f"{where} mixes Parquet and Arrow files")
        # The builder is named and the files are listed, so that nothing else in the folder has a say.
        data_files = {"train": [str(path) for path in files]}
        return datasets.load_dataset(kind.pop(), data_files=data_files, split="train", streaming=True), part
    except ScaleLongError:
        raise
    except Exception as error:  # the library and its readers raise many kinds
        raise ScaleLongError(f"{where} cannot be read as a Hugging Face dataset ({_brief(error)})") from error


def _open_hub(name: str, split: str, options: Options) -> tuple[Any, Part]:
    import datasets

    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ScaleLongError(f"{name!r} is neither a folder nor the name of a Hugging Face dataset (owner/name)")
    try:
        splits = {canonical(part): part for part in datasets.get_dataset_split_names(name, options.config)}
        part = choose(split, splits, options.holdout, f"hf:{name}")
        return datasets.load_dataset(name, options.config, split=splits[part.split]), part
    except ScaleLongError:
        raise
    except Exception as error:  # no network, no such name, no permission: the library raises many kinds
        raise SourceUnavailableError(f"hf:{name} cannot be had ({_brief(error)})") from error


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Table files by the split that their names say; all are `train` when none says any."""
    found: dict[str, list[Path]] = {}
    unsaid: list[Path] = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in TABLES and path.is_file()):
        words = set(re.split(r"[^a-z]+", path.relative_to(folder).as_posix().lower()))
        names = [name for name, aliases in ALIASES.items() if words.intersection(aliases)]
        if names:
            found.setdefault(names[0], []).append(path)
        else:
            unsaid.append(path)
    return found or {"train": unsaid}


def _column(features: Any, given: str | None, suits: Any, source: str, kind: str) -> str | None:
    """The column that was asked for, or the first that suits; only images are indispensable."""
    if given is not None:
        if given not in features:
            raise unknown(f"{kind} column of {source}", given, features)
        return given
    found = next((name for name, feature in features.items() if suits(name, feature)), None)
    if found is None and kind == "image":
        raise ScaleLongError(f"{source} has no column of images; it has {', '.join(features)}")
    return found


def _is_image(name: str, feature: Any) -> bool:
    return type(feature).__name__ == "Image" or (isinstance(feature, dict) and "bytes" in feature)


def _is_label(name: str, feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel" or name in LABELS


def _is_caption(name: str, feature: Any) -> bool:
    return name in CAPTIONS


def _classes(rows: Any, column: str, source: str) -> tuple[tuple[str, ...], dict[object, int] | None]:
    """Class names, and for labels that are names the number of each."""
    feature = rows.features[column]
    if type(feature).__name__ == "ClassLabel":
        return tuple(feature.names), None
    values = {row[column] for row in rows.select_columns([column])}
    if values and all(isinstance(value, str) for value in values):
        names = sorted(values)
        return tuple(names), {name: index for index, name in enumerate(names)}
    if not values or not all(isinstance(value, int) for value in values) or max(values) > MAX_CLASSES:
        raise ScaleLongError(f"{source} has labels in {column!r} that are neither names nor numbers from 0")
    return tuple(str(index) for index in range(max(*values, 0) + 1)), None


def _runs(rows: Any, group: str | None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    if group is None:
        yield from ((index, [row]) for index, row in enumerate(rows))
        return
    for index, (_, run) in enumerate(itertools.groupby(rows, key=lambda row: row[group])):
        yield index, list(run)


@dataclass(frozen=True)
class _Columns:
    image: str
    label: str | None
    caption: str | None
    numbers: dict[object, int] | None  # of labels that are names
    local: bool


def _example(
    name: str,
    rows: list[dict[str, Any]],
    columns: _Columns,
    options: Options,
    decode: Callable[[Path | bytes, str, Options], Pixels],
) -> Example:
    cell = rows[0][columns.image]
    content: bytes | Path | None = cell.get("bytes") if isinstance(cell, dict) else cell
    if content is None and isinstance(cell, dict) and cell.get("path") and not columns.local:
        content = Path(cell["path"])  # a file of the hub's own cache; a local table does not get to name files
    if not isinstance(content, bytes | Path):
        raise BadExampleError(name, "has no image")
    captions: tuple[str, ...] = ()
    if columns.caption is not None:
        captions = clean_captions((text for row in rows for text in _texts(row[columns.caption])), name)
    label = None
    if columns.label is not None:
        value = rows[0][columns.label]
        label = value if columns.numbers is None else columns.numbers.get(value)
        if not isinstance(label, int):
            raise BadExampleError(name, f"has label {value!r}, which is no class")
    return Example(name, decode(content, name, options), label, captions)


def _texts(cell: Any) -> list[Any]:
    """A caption column's cell: text, a list of texts, or a dict of lists such as {"raw": […]}."""
    if cell is None:
        return []
    if isinstance(cell, dict):
        cell = cell.get("raw", [])
    return list(cell) if isinstance(cell, list) else [cell]


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "…"
