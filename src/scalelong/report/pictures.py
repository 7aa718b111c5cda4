"""Sample grids for the page: as small as they can be shown, within a budget of bytes, with their captions."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scalelong.data.images import GRID_KEY
from scalelong.files import sha256
from scalelong.runs.run import REAL, Run

if TYPE_CHECKING:
    from PIL.Image import Image

BUDGET = 2_500_000  # bytes of pictures on one page
MAX_PIXELS = 64_000_000
SMALL = 10_000  # bytes; such a picture stays exact
CAPTIONED = 3  # images across, and rows, if each has a caption of its own


class Level(NamedTuple):
    """How much of the grids is shown."""

    steps: int
    across: int  # images
    side: int  # pixels
    lossy: bool


# Many or large grids lose exactness first, then steps, then images, then resolution.
LEVELS = (
    Level(8, 8, 1040, False), Level(8, 8, 1040, True), Level(4, 8, 1040, True), Level(3, 6, 780, True),
    Level(2, 5, 640, True), Level(1, 4, 520, True), Level(1, 3, 390, True), Level(1, 2, 260, True),
    Level(1, 2, 130, True),
)  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """The grid of one step.

    strips    data URLs, one below the other; several if every image has a caption of its own
    columns   images across; 0 if that is not known
    heads     a caption above each column
    captions  the captions below each strip
    """

    step: int
    strips: tuple[str, ...]
    width: int
    height: int
    columns: int = 0
    heads: tuple[str, ...] = ()
    captions: tuple[tuple[str, ...], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(map(len, self.strips))


@dataclass(frozen=True)
class Pictures:
    """The sheets of every run by step, and real images with the indices of the runs that they belong to."""

    samples: list[list[Sheet]]
    real: list[tuple[Sheet, list[int]]]


def pictures(runs: Sequence[Run], budget: int = BUDGET) -> Pictures:
    """Every run's samples/step-N.png and samples/real.png, at the best level that fits into `budget` bytes."""
    same: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if (path := run.samples_path / REAL).is_file():
            same.setdefault(sha256(path), []).append(index)
    for level in LEVELS:
        found = [(sheet(runs[own[0]].samples_path / REAL, 0, runs[own[0]], level), own) for own in same.values()]
        result = Pictures([], [(picture, own) for picture, own in found if picture is not None])
        left = budget - sum(picture.bytes for picture, _ in result.real)
        for run in runs:
            made = [sheet(path, step, run, level) for step, path in _sample_files(run, level.steps)]
            result.samples.append([picture for picture in made if picture is not None])
            left -= sum(picture.bytes for picture in result.samples[-1])
            if left < 0 and level is not LEVELS[-1]:
                break
        else:
            return result
    return result


def sheet(path: Path, step: int, run: Run, level: Level) -> Sheet | None:
    """The grid in `path` within the limits of `level`; None if the file is not an image."""
    from PIL import Image

    _, across, side, lossy = level

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                return None
            facts = _facts(opened.info.get(GRID_KEY), run)
            picture: Image.Image = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    (height, width), columns, captions = facts
    natural = columns * (width + 1) + 1
    if columns and picture.width % natural == 0:
        factor = picture.width // natural
        picture = picture.resize((natural, picture.height // factor), Image.Resampling.NEAREST)
    elif columns:  # scaled down: images lie between pixels
        columns = 0
    else:
        picture = _natural_size(picture)
        columns = (picture.width - 1) // (width + 1) if width and (picture.width - 1) % (width + 1) == 0 else 0
    if not columns:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        return Sheet(step, (_address(picture, lossy),), *picture.size)
    heads = captions[:columns] if captions == (captions[:columns] * len(captions))[: len(captions)] else ()
    shown = columns if heads else min(columns, CAPTIONED if captions else across, max(2, side // (width + 1)))
    rows = min((picture.height - 1) // (height + 1), CAPTIONED if captions and not heads else max(across, shown))
    box = (0, 0, shown * (width + 1) + 1, rows * (height + 1) + 1)
    if not captions or heads:
        picture = picture.crop(box)
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        return Sheet(step, (_address(picture, lossy),), *picture.size, shown, heads)
    strips = [picture.crop((0, row * (height + 1), box[2], (row + 1) * (height + 1) + 1)) for row in range(rows)]
    for strip in strips:
        strip.thumbnail((side, side), Image.Resampling.LANCZOS)
    lines = tuple(captions[row * columns : row * columns + shown] for row in range(rows))
    return Sheet(step, tuple(_address(strip, lossy) for strip in strips), *strips[0].size, shown, captions=lines)


def _facts(text: Any, run: Run) -> tuple[tuple[int, int], int, tuple[str, ...]]:
    """Height and width of an image, columns and captions, from the file's text; for older files from the run."""
    try:
        stored = json.loads(text)
        height, width = map(int, stored["image"])
        captions = tuple(str(caption)[:200] for caption in stored["captions"])
        if 0 < height <= 4096 and 0 < width <= 4096 and int(stored["columns"]) > 0:
            return (height, width), int(stored["columns"]), captions
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        pass
    shapes = run.record.get("shapes")
    size = shapes.get("size") if isinstance(shapes, dict) and run.settings.get("data.vae") is None else None
    size = size if isinstance(size, int) and 0 < size <= 1024 else 0
    return (size, size), 0, ()


def _sample_files(run: Run, count: int) -> list[tuple[int, Path]]:
    """(step, file) of `count` of a run's grids, evenly over the steps and always with the last."""
    names = [(re.fullmatch(r"step-(\d{1,12})\.png", path.name), path) for path in run.samples_path.glob("step-*.png")]
    files = sorted((int(match[1]), path) for match, path in names if match and path.is_file())
    if len(files) <= count:
        return files
    wanted = [files[-1][0] * (k + 1) / count for k in range(count)]
    chosen = {min(files, key=lambda file: abs(file[0] - step)) for step in wanted}
    return sorted(chosen | {files[-1]})[-count:]


def _address(picture: Image, lossy: bool) -> str:
    """The picture as a data URL."""
    data = np.asarray(picture)
    if (data == data[..., :1]).all():
        picture = picture.convert("L")
    kind = "png"
    memory = io.BytesIO()
    picture.save(memory, format="PNG", compress_level=9)
    if lossy and memory.tell() > SMALL:
        kind, memory = "webp", io.BytesIO()
        picture.save(memory, format="WEBP", quality=85)
    return f"data:image/{kind};base64," + base64.b64encode(memory.getvalue()).decode("ascii")


def _natural_size(picture: Image) -> Image:
    """Undo an enlargement by an integer factor: a grid of 8×8 digits needs 73 pixels, not 1022."""
    data = np.asarray(picture)
    for factor in range(32, 1, -1):
        small = data[::factor, ::factor].repeat(factor, 0).repeat(factor, 1)
        if np.array_equal(small, data):
            return picture.resize((picture.width // factor, picture.height // factor), 0)  # nearest
    return picture
