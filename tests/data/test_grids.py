"""Grids of images: enlarged by whole pixels, bounded in pixels and bytes, with their captions inside the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from scalelong.data import images as module
from scalelong.data.images import GRID_KEY, save_grid


def pictures(n, side, channels=1):
    return np.random.default_rng(0).integers(0, 256, (n, side, side, channels), dtype=np.uint8)


@pytest.mark.parametrize(("n", "side", "factor"), [(64, 8, 14), (1000, 8, 8), (16, 28, 8), (64, 32, 3), (64, 64, 1)])
def test_small_images_are_enlarged_by_whole_pixels(tmp_path, n, side, factor):
    images = pictures(n, side)
    assert save_grid(images, tmp_path / "grid.png") == factor
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    natural = grid[::factor, ::factor]
    np.testing.assert_array_equal(natural.repeat(factor, 0).repeat(factor, 1), grid)
    np.testing.assert_array_equal(natural[1 : side + 1, 1 : side + 1], images[0, :, :, 0])


@pytest.mark.parametrize(("n", "side", "columns"), [(400, 256, None), (300, 8, 1), (300, 8, 300)])
def test_no_side_exceeds_the_maximum(tmp_path, n, side, columns):
    scale = save_grid(np.zeros((n, side, side, 1), np.uint8), tmp_path / "grid.png", columns)
    with Image.open(tmp_path / "grid.png") as grid:
        assert max(grid.size) <= module.MAX_GRID
    assert scale < 1 or columns


def test_a_grid_that_would_be_a_large_file_is_scaled_down(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_GRID_BYTES", 50_000)
    scale = save_grid(pictures(64, 32, 3), tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size <= 50_000
    assert 0 < scale < 1


def test_captions_are_stored_in_the_file(tmp_path):
    save_grid(pictures(3, 8), tmp_path / "grid.png", captions=["a red circle", "ein grünes Dreieck", "3"])
    with Image.open(tmp_path / "grid.png") as grid:
        stored = json.loads(grid.text[GRID_KEY])
    assert stored == {"image": [8, 8], "columns": 2, "captions": ["a red circle", "ein grünes Dreieck", "3"]}
