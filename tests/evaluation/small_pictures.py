"""Small random pictures, as arrays and as files."""

import numpy as np
from PIL import Image


def pictures(n, size=8, channels=3, seed=0, low=0, high=256):
    return np.random.default_rng(seed).integers(low, high, (n, size, size, channels), dtype=np.uint8)


def write_pictures(folder, array):
    folder.mkdir(parents=True, exist_ok=True)
    for k, picture in enumerate(array):
        Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(folder / f"{k:05d}.png")
    return folder
