"""Sample grids for the page: as small as they can be shown, within a budget of bytes."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BUDGET = 2_500_000  # bytes of PNG on one page
SIDE = 420  # pixels of a grid at most
FRAMES = 8  # steps shown of a run at most
# What is given up first when there are many or large grids: steps, then images of a grid, then colours.
Level = tuple[int, int, int | None]  # steps, images across, colours
LEVELS: tuple[Level, ...] = (
    (8, 8, None),
    (5, 8, None),
    (3, 8, None),
    (3, 6, None),
    (2, 5, None),
    (2, 4, 128),
    (1, 4, 64),
    (1, 3, 32),
    (1, 2, 16),
)


@dataclass(frozen=True)
class Frame:
    """A grid at a step, as the address of an image."""

    step: int
    address: str
    width: int
    height: int
    pixelated: bool  # small images are shown enlarged, without blur


def sample_frames(folders: Sequence[Path], tiles: Sequence[int | None], budget: int = BUDGET) -> list[list[Frame]]:
    """Frames of every run's samples/step-N.png; `tiles` are the sides of one image in them, where known."""
    files = [sample_files(folder) for folder in folders]
    for level in LEVELS[:-1]:
        frames = _frames(files, tiles, level, budget)
        if frames is not None:
            return frames
    return _frames(files, tiles, LEVELS[-1], None) or [[] for _ in folders]


def _frames(
    files: Sequence[list[tuple[int, Path]]], tiles: Sequence[int | None], level: Level, budget: int | None
) -> list[list[Frame]] | None:
    """All frames at this level, or None as soon as they are more than the budget."""
    count, across, colours = level
    spent, frames = 0, []
    for own, tile in zip(files, tiles, strict=True):
        frames.append([f for step, path in _spread(own, count) if (f := _frame(path, step, tile, across, colours))])
        spent += sum(len(frame.address) for frame in frames[-1])
        if budget is not None and spent > budget:
            return None
    return frames


def sample_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of a run's grids, in order."""
    found = []
    if (folder / "samples").is_dir():
        for path in (folder / "samples").iterdir():
            match = re.fullmatch(r"step-(\d{1,12})\.png", path.name)
            if match and path.is_file():
                found.append((int(match[1]), path))
    return sorted(found)


def _spread(files: list[tuple[int, Path]], count: int) -> list[tuple[int, Path]]:
    """`count` of them, evenly over the steps, the last always among them."""
    if len(files) <= count:
        return files
    last = files[-1][0]
    wanted = [last * (k + 1) / count for k in range(count)]
    chosen = {min(files, key=lambda file: abs(file[0] - step)) for step in wanted}
    return sorted(chosen | {files[-1]})[-count:]


def _frame(path: Path, step: int, tile: int | None, across: int, colours: int | None) -> Frame | None:
    from PIL import Image

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > 64_000_000:
                return None
            picture: Any = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    picture = _natural(picture)
    if tile:  # a grid of tiles with a line of one pixel around each
        side = across * (tile + 1) + 1
        picture = picture.crop((0, 0, min(side, picture.width), min(side, picture.height)))
    pixelated = max(picture.size) <= SIDE
    if not pixelated:
        factor = SIDE / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        picture = picture.resize(size, Image.Resampling.LANCZOS)
    data = np.asarray(picture)
    if (data == data[..., :1]).all():
        picture = picture.convert("L")
    elif colours is not None:
        picture = picture.quantize(colours)
    memory = io.BytesIO()
    picture.save(memory, format="PNG", compress_level=9)
    address = "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode("ascii")
    return Frame(step, address, picture.width, picture.height, pixelated)


def _natural(picture: Any) -> Any:
    """Undo an enlargement by a whole factor: a grid of 8×8 digits is 73 pixels wide, not 1022."""
    from PIL import Image

    data = np.asarray(picture)
    height, width = data.shape[:2]
    for factor in range(32, 1, -1):
        if height % factor == 0 and width % factor == 0:
            small = data[::factor, ::factor]
            if (np.repeat(np.repeat(small, factor, 0), factor, 1) == data).all():
                return Image.fromarray(small)
    return picture
