"""Hugging Face datasets, by name or from a local folder (`save_to_disk`, Parquet or Arrow files)."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from scalelong.data.records import SPLITS, Example, Options, Reading, canonical_split, choose_split, number_classes
from scalelong.errors import DataError, SourceUnavailableError, one_line, require, unknown

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
    local = Path(name).expanduser().is_dir()
    with _library_errors(name):
        splits = _splits(name, options)
        part = choose_split(split, splits, options.holdout, name if local else f"hf:{name}")
        rows = splits[part.split]()
    features = rows.features
    if features is None:
        raise DataError(f"{source} does not state its columns")
    image = _column(features, options.image_column, source, "image", "Image")
    label = _column(features, options.label_column, source, "label", "ClassLabel", LABELS)
    caption = _column(features, options.caption_column, source, "caption", names=CAPTIONS)
    if image is None:
        raise DataError(f"{source} has no column of images; its columns are {', '.join(features)}")
    class_names: tuple[str, ...] | None = None
    numbers: dict[Any, int] | None = None  # of labels that are not class numbers
    if label is not None and type(features[label]).__name__ == "ClassLabel":
        class_names = tuple(features[label].names)
    elif label is not None:
        with _library_errors(name):  # of all splits, so that classes have the same numbers in each
            parts = [rows, *(read() for other, read in splits.items() if other != part.split)]
            labels = {row[label] for each in parts if label in each.features for row in each.select_columns([label])}
        class_names, numbers = number_classes(labels, f"{source}, column {label!r}")
    if type(features[image]).__name__ == "Image":
        rows = rows.cast_column(image, datasets.Image(decode=False))

    def examples() -> Iterator[Example]:
        runs = itertools.groupby(enumerate(rows), key=lambda row: row[1][group] if group else row[0])
        with _library_errors(name):
            for index, (_, run) in enumerate(runs):
                if part.includes(f"row {index}", options.holdout):
                    grouped = [row for _, row in run]
                    number = None if label is None else grouped[0][label]
                    number = number if numbers is None else numbers.get(number)
                    texts = [] if caption is None else [text for row in grouped for text in _texts(row[caption])]
                    yield Example(f"{source} row {index}", _content(grouped[0][image], local), number, texts)

    total = len(rows) if hasattr(rows, "__len__") and group is None and part.held_out is None else None
    return Reading(examples(), total, class_names, caption is not None, source=source)


def _splits(name: str, options: Options) -> dict[str, Callable[[], Any]]:
    """Return a call for the rows of each split: from the hub, from `save_to_disk`, or from tables."""
    import datasets

    folder = Path(name).expanduser()
    if not folder.is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise DataError(f"{name!r} is neither a folder nor the name of a Hugging Face dataset (owner/name)")
    splits: dict[str, Callable[[], Any]] = {}
    if not folder.is_dir():
        for each in datasets.get_dataset_split_names(name, options.config):
            splits[canonical_split(each)] = partial(datasets.load_dataset, name, options.config, split=each)
    elif (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        saved = datasets.load_from_disk(str(folder))
        parts = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        splits = {canonical_split(each): partial(parts.get, each) for each in parts}
    else:
        for each, files in _tables(folder).items():
            # Naming the builder and listing the files keeps scripts and settings in the folder out of it.
            builder, listed = files[0].suffix[1:], {"train": [str(file) for file in files]}
            splits[each] = partial(datasets.load_dataset, builder, data_files=listed, split="train", streaming=True)
    return splits


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # no network, no such name, damaged files: the library raises many kinds of errors
        reason = (one_line(error) or type(error).__name__)[:200]
        if Path(name).expanduser().is_dir():
            raise DataError(f"cannot read {name} as a Hugging Face dataset ({reason})") from error
        raise SourceUnavailableError(f"cannot load hf:{name} ({reason})") from error


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Return Parquet or Arrow files by the split that their names tell; all are `train` if none does."""
    splits: dict[str, list[Path]] = {}
    files = sorted(path for path in folder.rglob("*") if path.suffix in TABLES and path.is_file())
    for path in files:
        words = set(re.split(r"[^a-z]+", path.relative_to(folder).as_posix().lower()))
        name = next((name for name, aliases in SPLITS.items() if words.intersection(aliases)), None)
        if name is not None:
            splits.setdefault(name, []).append(path)
    return splits or {"train": files}


def _column(
    features: Any, chosen: str | None, source: str, role: str, kind: str = "", names: Sequence[str] = ()
) -> str | None:
    """Return the chosen column, or else the first one of this kind of feature or with one of these names."""
    if chosen is not None and chosen not in features:
        raise unknown(f"{role} column of {source}", chosen, features)
    for name, feature in features.items() if chosen is None else ():
        encoded = isinstance(feature, dict) and "bytes" in feature  # an image in a table
        if name in names or kind == ("Image" if encoded else type(feature).__name__):
            return str(name)
    return chosen


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
