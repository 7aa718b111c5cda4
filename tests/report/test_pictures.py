"""Sample grids: as small as their content, within the budget."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
from made_runs import noisy_picture
from PIL import Image

from scalelong.data.images import save_grid
from scalelong.report.pictures import sample_frames
from scalelong.runs.run import Run


def opened(frame):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(frame.address.partition(",")[2]))))


def recorded(folder, size):
    """A run whose config.json records the size of its images."""
    (folder / "config.json").write_text(json.dumps({"config": {}, "shapes": {"size": size}}))
    return Run(folder)


def test_an_enlarged_grid_is_restored_pixel_by_pixel(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
    save_grid(pictures, tmp_path / "samples" / "step-00000100.png")
    ((frame,),) = sample_frames([recorded(tmp_path, 8)])
    assert (frame.step, frame.width, frame.height, frame.pixelated) == (100, 73, 73, True)
    grid = opened(frame)
    np.testing.assert_array_equal(grid[1:9, 1:9], pictures[0, :, :, 0])
    np.testing.assert_array_equal(grid[64:72, 64:72], pictures[63, :, :, 0])


def test_many_large_grids_stay_within_the_budget_and_keep_the_last_step(tmp_path):
    folders = [tmp_path / f"run{k}" for k in range(12)]
    for folder in folders:
        for step in (100, 200, 300):
            noisy_picture(folder / "samples" / f"step-{step:08d}.png", 265)
    frames = sample_frames([recorded(folder, 32) for folder in folders], budget=1_000_000)
    assert sum(len(frame.address) for own in frames for frame in own) <= 1_000_000
    assert all(own[-1].step == 300 for own in frames)


def test_photographs_are_scaled_down(tmp_path):
    noisy_picture(tmp_path / "samples" / "step-00000001.png", 900)
    ((frame,),) = sample_frames([Run(tmp_path)])
    assert max(frame.width, frame.height) <= 420


def test_files_that_are_not_pictures_are_left_out(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-00000001.png").write_bytes(b"not a picture")
    (tmp_path / "samples" / "step-x.png").write_bytes(b"")
    (tmp_path / "samples" / "../step-00000002.png").write_bytes(b"")
    assert sample_frames([recorded(tmp_path, 8), Run(tmp_path / "absent")]) == [[], []]
