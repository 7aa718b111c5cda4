"""Sample grids of a run: captions, and real images with the same conditions beside them."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from scalelong.data import load
from scalelong.data.images import GRID_KEY
from scalelong.training.loop import train
from tiny_runs import tiny_config


def natural(path):
    """The images of a grid of 8 × 8 images, and its captions."""
    with Image.open(path) as grid:
        captions = json.loads(grid.text[GRID_KEY])["captions"]
        pixels = np.asarray(grid)
    factor = next(f for f in range(64, 0, -1) if np.array_equal(pixels[::f, ::f].repeat(f, 0).repeat(f, 1), pixels))
    pixels = pixels[::factor, ::factor]
    rows, columns = (pixels.shape[0] - 1) // 9, (pixels.shape[1] - 1) // 9
    tiles = [pixels[9 * r + 1 : 9 * r + 9, 9 * c + 1 : 9 * c + 9] for r in range(rows) for c in range(columns)]
    return tiles, captions


def test_a_class_run_shows_real_images_of_the_same_classes(tmp_path):
    train(tiny_config("digits-uvit-class", train__steps=1, sample__n=20, sample__steps=2), tmp_path / "run", quiet=True)
    samples, captions = natural(tmp_path / "run" / "samples" / "step-00000001.png")
    assert len(samples) == 20
    assert captions == [str(k % 10) for k in range(20)]
    real, same = natural(tmp_path / "run" / "samples" / "real.png")
    assert same == captions
    digits = load("digits", "train")
    for tile, name in zip(real, captions, strict=True):
        own = digits.images[digits.labels == int(name), :, :, 0]
        assert (own == tile).all((1, 2)).any()


def test_a_run_without_conditions_shows_real_images_from_all_of_its_data(tmp_path):
    train(tiny_config(train__steps=1, sample__n=4, sample__steps=2), tmp_path / "run", quiet=True)
    real, captions = natural(tmp_path / "run" / "samples" / "real.png")
    assert captions == []
    digits = load("digits", "train").images[..., 0]
    rows = [int(np.flatnonzero((digits == tile).all((1, 2)))[0]) for tile in real]
    assert rows == [k * len(digits) // 4 for k in range(4)]
