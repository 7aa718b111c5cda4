"""Sample grids for the page: as small as they can be shown, within a budget of bytes."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scalelong.runs.run import Run

if TYPE_CHECKING:
    from PIL.Image import Image

BUDGET = 2_500_000  # bytes of PNG on one page
SIDE = 420  # pixels of a grid at most
MAX_PIXELS = 64_000_000
# Many or large grids drop steps first, then images of a grid, then colors: (steps, images across, colors).
LEVELS: tuple[tuple[int, int, int | None], ...] = (
    (8, 8, None), (5, 8, None), (3, 8, None), (3, 6, None), (2, 5, None), (2, 4, 128), (1, 4, 64), (1, 3, 32),
    (1, 2, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """The grid of one step as a data URL. `pixelated` grids are enlarged without blur."""

    step: int
    address: str
    width: int
    height: int
    pixelated: bool


def sample_frames(runs: Sequence[Run], budget: int = BUDGET) -> list[list[Frame]]:
    """The frames of every run's samples/step-N.png, at the best level that fits into `budget` bytes."""
    for count, across, colors in LEVELS:
        frames: list[list[Frame]] = []
        bytes_left = budget
        for run in runs:
            made = [_frame(path, step, _tile_size(run), across, colors) for step, path in _sample_files(run, count)]
            frames.append([frame for frame in made if frame is not None])
            bytes_left -= sum(len(frame.address) for frame in frames[-1])
            if bytes_left < 0 and count > 1:
                break
        if bytes_left >= 0:
            break
    return frames


def _sample_files(run: Run, count: int) -> list[tuple[int, Path]]:
    """(step, file) of `count` of a run's grids, evenly over the steps and always with the last."""
    names = [(re.fullmatch(r"step-(\d{1,12})\.png", path.name), path) for path in run.samples_path.glob("step-*.png")]
    files = sorted((int(match[1]), path) for match, path in names if match and path.is_file())
    if len(files) <= count:
        return files
    wanted = [files[-1][0] * (k + 1) / count for k in range(count)]
    chosen = {min(files, key=lambda file: abs(file[0] - step)) for step in wanted}
    return sorted(chosen | {files[-1]})[-count:]


def _tile_size(run: Run) -> int | None:
    """The side of one image in a grid, if the run records it."""
    shapes = run.record.get("shapes")
    size = shapes.get("size") if isinstance(shapes, dict) and run.settings.get("data.vae") is None else None
    return size if isinstance(size, int) and 0 < size <= 1024 else None


def _frame(path: Path, step: int, tile: int | None, across: int, colors: int | None) -> Frame | None:
    """The grid in `path`, cropped to `across` images and scaled down to SIDE; None if the file is not an image."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                return None
            picture: Image.Image = opened.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    picture = _natural_size(picture)
    if tile:  # each image has a line of one pixel around it
        side = across * (tile + 1) + 1
        picture = picture.crop((0, 0, min(side, picture.width), min(side, picture.height)))
    pixelated = max(picture.size) <= SIDE
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    data = np.asarray(picture)
    if (data == data[..., :1]).all():
        picture = picture.convert("L")
    elif colors is not None:
        picture = picture.quantize(colors)
    memory = io.BytesIO()
    picture.save(memory, format="PNG", compress_level=9)
    address = "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode("ascii")
    return Frame(step, address, picture.width, picture.height, pixelated)


def _natural_size(picture: Image) -> Image:
    """Undo an enlargement by an integer factor: a grid of 8×8 digits needs 73 pixels, not 1022."""
    data = np.asarray(picture)
    for factor in range(32, 1, -1):
        small = data[::factor, ::factor].repeat(factor, 0).repeat(factor, 1)
        if np.array_equal(small, data):
            return picture.resize((picture.width // factor, picture.height // factor), 0)  # nearest
    return picture
