"""Random pictures for tests."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(seed: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Image.Image:
    """A random picture; `size` is (width, height)."""
    rng = np.random.default_rng(seed)
    bands = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    if mode == "CMYK":
        return Image.frombytes("CMYK", size, pixels.tobytes())
    return Image.fromarray(pixels[:, :, 0] if bands == 1 else pixels)
