"""WebDataset archives: tar files whose members of one name are an example (`00017.jpg`, `00017.cls`, `00017.txt`).

The archives are read once, from front to back, and never unpacked: the examples go straight into the prepared arrays.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType

from scalelong.data.images import MAX_BYTES, SUFFIXES
from scalelong.data.records import SPLITS, Example, Options, Reading, choose_split, number_classes
from scalelong.errors import DataError, one_line

LABELS, TEXTS = (".cls",), (".txt", ".text", ".caption")
Label = int | str
LOOK = 64  # members of the first archive that decide whether it is one


def tar_shards(path: Path) -> dict[str, list[Path]]:
    """Return the archives of each split if `path` is a WebDataset: a .tar of grouped members, or a folder of those.

    Archives whose names begin with a split's name belong to it (`train-000000.tar`); all others to `train`.
    """
    files = (
        [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    )
    files = [file for file in files if file.suffix.lower() != ".json"]  # an index such as sizes.json
    if not files or not all(file.name.lower().endswith((".tar", ".tar.gz", ".tgz")) for file in files):
        return {}
    if not _is_grouped(files[0], with_captions=path.is_dir()):
        return {}
    splits: dict[str, list[Path]] = {}
    for file in files:
        start = [name for name, words in SPLITS.items() if file.name.lower().startswith(words)]
        splits.setdefault(start[0] if start else "train", []).append(file)
    return splits


def read_tars(path: Path, split: str, options: Options) -> Reading:
    """Read one split. Labels are `.cls` (integers) or `label` in `.json`; captions are `.txt` or `caption`."""
    splits = tar_shards(path)
    part = choose_split(split, splits, options.holdout, str(path))
    files = splits[part.split]
    found = {name: _facts(each) for name, each in splits.items()}
    labels = {label for each, _ in found.values() for label in each}  # of all splits, numbered alike
    names, number = number_classes(labels, str(path)) if labels else (None, {})
    captioned = found[part.split][1]

    def examples() -> Iterator[Example]:
        for example, label in _examples(files):
            if part.includes(example.name, options.holdout):
                yield replace(example, label=None if label is None else number[label])

    return Reading(examples(), None, names, captioned)


def _is_grouped(file: Path, with_captions: bool) -> bool:
    """Whether every image among the first members shares its name with a label or metadata, or with a caption.

    Captions alone do not tell for a single archive, which may be a folder of images with `.txt` files.
    """
    suffixes: dict[str, set[str]] = {}
    try:
        with tarfile.open(file, "r|*") as tar:
            for number, member in enumerate(tar):
                if number == LOOK:
                    break
                stem, suffix = _split_name(member.name)
                if member.isreg():
                    suffixes.setdefault(stem, set()).add(suffix)
    except (tarfile.TarError, OSError, EOFError):
        return False
    grouped = [found for found in suffixes.values() if found & SUFFIXES]
    beside = {*LABELS, ".json", *(TEXTS if with_captions else ())}
    labelled = sum(bool(found & beside) for found in grouped)
    return labelled > 0 and labelled >= len(grouped) - 1


def _facts(files: Sequence[Path]) -> tuple[set[Label], bool]:
    """Return the labels, and whether there are captions. Skips over the images."""
    labels, captioned = set[Label](), False
    for example, label in _examples(files, images=False):
        if label is not None:
            labels.add(label)
        captioned = captioned or bool(example.captions)
    return labels, captioned


def _examples(files: Sequence[Path], images: bool = True) -> Iterator[tuple[Example, Label | None]]:
    for file in files:
        try:
            with tarfile.open(file, "r|*") as tar:
                key, parts = "", dict[str, bytes]()
                for member in tar:
                    if not member.isreg():
                        continue
                    stem, suffix = _split_name(member.name)
                    if stem != key and parts:
                        yield _example(file, key, parts)
                        parts = {}
                    key = stem
                    if member.size > MAX_BYTES:
                        raise DataError(f"{file.name}: {member.name} is larger than {MAX_BYTES >> 20} MiB")
                    content = tar.extractfile(member) if images or suffix not in SUFFIXES else None
                    parts[suffix] = content.read() if content is not None else b""
                if parts:
                    yield _example(file, key, parts)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise DataError(f"{file} is a broken archive ({one_line(error)})") from None


def _example(file: Path, key: str, parts: dict[str, bytes]) -> tuple[Example, Label | None]:
    image = next((content for suffix, content in parts.items() if suffix in SUFFIXES), None)
    try:
        facts = json.loads(parts[".json"]) if ".json" in parts else {}
        label = next((int(parts[suffix]) for suffix in LABELS if suffix in parts), facts.get("label"))
        text = next((parts[suffix].decode() for suffix in TEXTS if suffix in parts), facts.get("caption"))
        if not isinstance(label, (int, str, NoneType)) or isinstance(label, bool):
            raise ValueError(f"label must be an integer or a name, got {label!r}")
        if not isinstance(text, (str, list, NoneType)):
            raise ValueError(f"caption must be text or a list of texts, got {text!r}")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file.name}: {key} has a label or metadata that cannot be read ({one_line(error)})") from None
    captions = [line for line in text.splitlines() if line.strip()] if isinstance(text, str) else text or ()
    return Example(f"{file.name}:{key}", image, None, captions), label


def _split_name(name: str) -> tuple[str, str]:
    """`a/0001.seg.png` → `a/0001`, `.png`: everything behind the first dot is the extension, its last part the kind."""
    folder, _, base = name.rpartition("/")
    stem, dot, _ = base.partition(".")
    return f"{folder}/{stem}", os.path.splitext(base)[1].lower() if dot else ""
