"""Sample grids: as small as their content, within the budget."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from made_runs import noisy_picture
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from scalelong.data.images import GRID_KEY, save_grid
from scalelong.report.pictures import pictures
from scalelong.runs.run import Run


def opened(address):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def noise(n, side):
    return np.random.default_rng(0).integers(0, 256, (n, side, side, 1), dtype=np.uint8)


def recorded(folder, size):
    """A run whose config.json records the size of its images."""
    (folder / "config.json").write_text(json.dumps({"config": {}, "shapes": {"size": size}}))
    return Run(folder)


@pytest.mark.parametrize("older", [False, True])
def test_an_enlarged_grid_is_restored_pixel_by_pixel(tmp_path, older):
    images, path = noise(64, 8), tmp_path / "samples" / "step-00000100.png"
    save_grid(images, path)
    if older:  # without the text chunk
        Image.open(path).convert("L").save(path)
    ((sheet,),) = pictures([recorded(tmp_path, 8)]).samples
    assert (sheet.step, sheet.width, sheet.height, sheet.columns) == (100, 73, 73, 8)
    grid = opened(*sheet.strips)
    np.testing.assert_array_equal(grid[1:9, 1:9], images[0, :, :, 0])
    np.testing.assert_array_equal(grid[64:72, 64:72], images[63, :, :, 0])


def test_classes_stand_above_their_columns(tmp_path):
    names = [f"class {k % 10}" for k in range(60)]
    save_grid(noise(60, 8), tmp_path / "samples" / "step-00000100.png", 10, names)
    ((sheet,),) = pictures([Run(tmp_path)]).samples
    assert (len(sheet.strips), sheet.columns, sheet.captions) == (1, 10, ())
    assert sheet.heads == tuple(names[:10])


def test_each_prompt_stands_below_its_image(tmp_path):
    images, prompts = noise(36, 8), [f"prompt {k}" for k in range(36)]
    save_grid(images, tmp_path / "samples" / "step-00000100.png", captions=prompts)
    ((sheet,),) = pictures([Run(tmp_path)]).samples
    assert sheet.heads == ()
    assert sheet.captions[1] == ("prompt 6", "prompt 7", "prompt 8")
    np.testing.assert_array_equal(opened(sheet.strips[1])[1:9, 10:18], images[7, :, :, 0])


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"image": [8, 8], "columns": Infinity, "captions": []}', '{"image": 8, "columns": 2}',
     '{"image": [8, 8], "columns": 1e300, "captions": 5}', '{"image": [8, 8], "columns": 99999, "captions": [{}]}'],
)  # fmt: skip
def test_a_grid_with_damaged_facts_is_shown_without_them(tmp_path, text):
    (tmp_path / "samples").mkdir()
    info = PngInfo()
    info.add_text(GRID_KEY, text)
    Image.fromarray(noise(1, 40)[0, :, :, 0]).save(tmp_path / "samples" / "step-00000001.png", pnginfo=info)
    ((sheet,),) = pictures([Run(tmp_path)]).samples
    assert (sheet.width, sheet.columns) == (40, 0)


def test_runs_on_the_same_data_share_their_real_images(tmp_path):
    for name, images in (("a", noise(4, 8)), ("b", noise(4, 8)), ("c", noise(9, 8))):
        save_grid(images, tmp_path / name / "samples" / "real.png")
    found = pictures([Run(tmp_path / name) for name in "abc"])
    assert [own for _, own in found.real] == [[0, 1], [2]]


def test_large_images_are_cropped_rather_than_scaled(tmp_path):
    save_grid(noise(16, 256), tmp_path / "samples" / "step-00000100.png")
    ((sheet,),) = pictures([Run(tmp_path)]).samples
    assert (sheet.columns, sheet.width) == (4, 1029)


def test_many_large_grids_stay_within_the_budget_and_keep_the_last_step(tmp_path):
    folders = [tmp_path / f"run{k}" for k in range(12)]
    for folder in folders:
        for step in (100, 200, 300):
            noisy_picture(folder / "samples" / f"step-{step:08d}.png", 265)
    sheets = pictures([recorded(folder, 32) for folder in folders], budget=1_000_000).samples
    assert len(sheets) == 12
    assert sum(sheet.bytes for own in sheets for sheet in own) <= 1_000_000
    assert all(own[-1].step == 300 for own in sheets)


def test_photographs_are_scaled_down(tmp_path):
    noisy_picture(tmp_path / "samples" / "step-00000001.png", 1300)
    ((sheet,),) = pictures([Run(tmp_path)]).samples
    assert max(sheet.width, sheet.height) <= 1040


def test_files_that_are_not_pictures_are_left_out(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step-00000001.png").write_bytes(b"not a picture")
    (tmp_path / "samples" / "step-x.png").write_bytes(b"")
    (tmp_path / "samples" / "../step-00000002.png").write_bytes(b"")
    (tmp_path / "samples" / "real.png").write_bytes(b"not a picture")
    found = pictures([recorded(tmp_path, 8), Run(tmp_path / "absent")])
    assert (found.samples, found.real) == ([[], []], [])
