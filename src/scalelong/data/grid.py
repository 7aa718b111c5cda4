"""Many images on one sheet, to look at what was prepared."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalelong.files import atomic_file

SIDE = 1024  # pixels that a sheet has at least, so that tiny images can be seen


def save_grid(images: npt.NDArray[np.uint8], path: Path | str, columns: int | None = None) -> None:
    """Write images (n, h, w, c) as a PNG sheet, enlarged by a whole factor where they are small."""
    from PIL import Image

    count, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 128, np.uint8)
    for index in range(count):
        top, left = (index // columns) * (height + 1) + 1, (index % columns) * (width + 1) + 1
        sheet[top : top + height, left : left + width] = images[index]
    picture = Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)
    factor = max(1, SIDE // picture.width)
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    with atomic_file(path) as aside:
        picture.save(aside, format="PNG")
