"""MS-COCO's published files: folders of pictures and a file of captions, about five a picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from scalelong.data.images import read_image
from scalelong.data.records import Example, Options, Reading, SourceUnavailableError, shown
from scalelong.data.sources import find
from scalelong.errors import ScaleLongError

YEARS = ("2014", "2017")  # in this order; U-ViT and the paper use 2014
FOLDERS = {"train": "train", "validation": "val"}


def read_coco(folder: Path, split: str, options: Options, source: str) -> Reading:
    """One split from a folder that holds train2014/, val2014/ and annotations/ (or those of 2017)."""
    for year in YEARS:
        part = f"{FOLDERS[split]}{year}"
        captions, pictures = find(folder, f"captions_{part}.json"), find(folder, part)
        if captions and pictures:
            rows = _rows(captions[0])
            jobs = (partial(_example, pictures[0], name, texts, options) for name, texts in rows)
            return Reading(jobs, source, len(rows), captioned=True, decodes=True, notes={"year": year})
    part = FOLDERS[split]
    raise SourceUnavailableError(f"{folder} holds no {part}2014/ and annotations/captions_{part}2014.json (or 2017)")


def _rows(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """File names with their captions, in the order of the picture's number."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        texts: dict[int, list[str]] = {image["id"]: [] for image in stated["images"]}
        for annotation in sorted(stated["annotations"], key=lambda annotation: annotation["id"]):
            texts[annotation["image_id"]].append(annotation["caption"])
        rows = [(image["file_name"], tuple(texts[image["id"]])) for image in sorted(stated["images"], key=_number)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScaleLongError(f"{path} is not a file of COCO captions ({type(error).__name__}: {error})") from None
    for name, _ in rows:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ScaleLongError(f"{path} names {shown(str(name))!r}, which is not a plain file name")
    return rows


def _number(image: dict[str, int]) -> int:
    return image["id"]


def _example(folder: Path, name: str, captions: tuple[str, ...], options: Options) -> Example:
    return Example(name, read_image(folder / name, name, options), None, captions)
