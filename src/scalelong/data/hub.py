"""Hugging Face datasets, by name or from a local folder (`save_to_disk`, Parquet or Arrow files)."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scalelong.data.records import (
    SPLITS,
    Example,
    Options,
    Part,
    Reading,
    SourceUnavailableError,
    canonical_split,
    choose_split,
    number_classes,
)
from scalelong.errors import DataError, one_line, require, unknown

LABELS = ("label", "labels", "fine_label", "class")
CAPTIONS = ("captions", "caption", "text", "sentences")
TABLES = (".parquet", ".arrow")


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face dataset rather than images."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return True
    return any(path.suffix in TABLES for path in itertools.chain(folder.glob("*"), folder.glob("*/*")))


def hub_is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (or HF_DATASETS_OFFLINE) is set, as Hugging Face's libraries read it."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def read_hub(name: str, split: str, options: Options, source: str, group: str | None = None) -> Reading:
    """Read one split of a dataset. Consecutive rows with the same value in column `group` are captions of one image."""
    datasets = require("datasets", "datasets", "Hugging Face datasets")
    folder = Path(name).expanduser()
    local = folder.is_dir()
    rows, part = _open_folder(folder, split, options) if local else _open_hub(name, split, options)
    features = rows.features
    if features is None:
        raise DataError(f"{source} does not state its columns")
    image = _column(features, options.image_column, _is_image, source, "image")
    label = _column(features, options.label_column, _is_label, source, "label")
    caption = _column(features, options.caption_column, lambda name, _: name in CAPTIONS, source, "caption")
    if image is None:
        raise DataError(f"{source} has no column of images; its columns are {', '.join(features)}")
    class_names: tuple[str, ...] | None = None
    numbers: dict[Any, int] | None = None
    if label is not None and type(features[label]).__name__ == "ClassLabel":
        class_names = tuple(features[label].names)
    elif label is not None:
        labels = {row[label] for row in rows.select_columns([label])}
        class_names, numbers = number_classes(labels, f"{source}, column {label!r}")
    if type(features[image]).__name__ == "Image":
        rows = rows.cast_column(image, datasets.Image(decode=False))

    def examples() -> Iterator[Example]:
        for index, grouped in enumerate(_grouped(rows, group)):
            if part.includes(f"row {index}", options.holdout):
                number = None if label is None else grouped[0][label]
                number = number if numbers is None else numbers.get(number)
                texts = [] if caption is None else [text for row in grouped for text in _texts(row[caption])]
                yield Example(f"{source} row {index}", _content(grouped[0][image], local), number, texts)

    total = len(rows) if hasattr(rows, "__len__") and group is None and part.held_out is None else None
    return Reading(examples(), total, class_names, caption is not None, source=source)


def _open_folder(folder: Path, split: str, options: Options) -> tuple[Any, Part]:
    import datasets

    try:
        if not ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
            return _open_tables(folder, split, options)
        saved = datasets.load_from_disk(str(folder))
        splits = {"train": saved}
        if isinstance(saved, datasets.DatasetDict):
            splits = {canonical_split(name): rows for name, rows in saved.items()}
        part = choose_split(split, splits, options.holdout, str(folder))
        return splits[part.split], part
    except DataError:
        raise
    except Exception as error:  # the library and its readers raise many kinds of errors
        raise DataError(f"cannot read {folder} as a Hugging Face dataset ({_brief(error)})") from error


def _open_tables(folder: Path, split: str, options: Options) -> tuple[Any, Part]:
    """Open Parquet or Arrow files. Their names tell the splits; all are `train` if none does."""
    import datasets

    splits: dict[str, list[Path]] = {}
    others: list[Path] = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in TABLES and path.is_file()):
        words = set(re.split(r"[^a-z]+", path.relative_to(folder).as_posix().lower()))
        name = next((name for name, aliases in SPLITS.items() if words.intersection(aliases)), None)
        (others if name is None else splits.setdefault(name, [])).append(path)
    splits = splits or {"train": others}
    part = choose_split(split, splits, options.holdout, str(folder))
    kinds = {path.suffix[1:] for path in splits[part.split]}
    if len(kinds) != 1:
        raise DataError(f"{folder} mixes Parquet and Arrow files")
    # Naming the builder and listing the files keeps scripts and settings in the folder out of it.
    files = {"train": [str(path) for path in splits[part.split]]}
    return datasets.load_dataset(kinds.pop(), data_files=files, split="train", streaming=True), part


def _open_hub(name: str, split: str, options: Options) -> tuple[Any, Part]:
    import datasets

    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise DataError(f"{name!r} is neither a folder nor the name of a Hugging Face dataset (owner/name)")
    try:
        splits = {canonical_split(part): part for part in datasets.get_dataset_split_names(name, options.config)}
        part = choose_split(split, splits, options.holdout, f"hf:{name}")
        return datasets.load_dataset(name, options.config, split=splits[part.split]), part
    except DataError:
        raise
    except Exception as error:  # no network, no such name, no permission: the library raises many kinds of errors
        raise SourceUnavailableError(f"cannot load hf:{name} ({_brief(error)})") from error


def _column(features: Any, name: str | None, suits: Callable[[str, Any], bool], source: str, kind: str) -> str | None:
    """Return the named column, or else the first one that suits."""
    if name is not None and name not in features:
        raise unknown(f"{kind} column of {source}", name, features)
    return name or next((column for column, feature in features.items() if suits(column, feature)), None)


def _is_image(name: str, feature: Any) -> bool:
    return type(feature).__name__ == "Image" or (isinstance(feature, dict) and "bytes" in feature)


def _is_label(name: str, feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel" or name in LABELS


def _grouped(rows: Any, group: str | None) -> Iterator[list[dict[str, Any]]]:
    if group is None:
        yield from ([row] for row in rows)
    else:
        yield from (list(run) for _, run in itertools.groupby(rows, key=lambda row: row[group]))


def _content(cell: Any, local: bool) -> bytes | Path | None:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if content is None and isinstance(cell, dict) and cell.get("path") and not local:
        content = Path(cell["path"])  # a file in the hub's own cache; a local table must not name files
    return content if isinstance(content, bytes | Path) else None


def _texts(cell: Any) -> list[Any]:
    """Return the captions in a cell: text, a list of texts, or a dict of lists such as {"raw": […]}."""
    if isinstance(cell, dict):
        cell = cell.get("raw")
    return list(cell) if isinstance(cell, list) else [] if cell is None else [cell]


def _brief(error: Exception) -> str:
    return (one_line(error) or type(error).__name__)[:200]
