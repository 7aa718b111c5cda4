"""The generated dataset `shapes` and the text encoder `words`."""

import numpy as np
import pytest
import torch

from scalelong.data import encode_prompts, load
from scalelong.data.shapes import COLOURS, NUMBERS, SHAPES, caption_of, combinations, draw
from scalelong.data.words import WordEncoder
from scalelong.errors import InvalidValueError


def test_held_out_combinations_are_new_and_their_words_are_known(tmp_path, monkeypatch):
    train, held_out = set(combinations("train")), set(combinations("validation"))
    assert not train & held_out
    assert len(train | held_out) == len(NUMBERS) * len(COLOURS) * len(SHAPES)
    words = {word for combination in train for word in combination}
    assert {word for combination in held_out for word in combination} <= words
    for kind in (NUMBERS, COLOURS, SHAPES):
        assert set(kind) <= {word for combination in held_out for word in combination} | {"red", "green", "blue"}
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    data = load("shapes", "validation")
    assert {data.captions[k] for k in range(len(data))} == {caption_of(c) for c in held_out}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawing_has_its_colour_and_number(shape):
    from scipy.ndimage import label

    for number, parts in (("a", 1), ("two", 2)):
        image = draw((number, "blue", shape), np.random.default_rng(5)).astype(float)
        inside = np.abs(image - 255).max(-1) > 100
        assert label(inside)[1] == parts
        assert np.abs(np.median(image[inside], axis=0) - COLOURS["blue"]).max() < 20


def test_captions_read_as_english():
    captions = {caption_of(c) for split in ("train", "validation") for c in combinations(split)}
    assert {"a red circle", "an orange cross", "two blue squares", "two black crosses"} <= captions


def test_words_need_no_download_and_depend_on_word_and_place_only():
    tokens = encode_prompts(["a red circle", "A RED  circle", "circle red a", "a red", ""], "words", 4)
    assert tokens.shape == (5, 4, WordEncoder.width)
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert torch.equal(tokens[0, :2], tokens[3, :2])
    assert not tokens[3, 2:].any()
    assert not tokens[4].any()
    assert tokens[0, 1, :3].tolist() == pytest.approx(
        [-0.6069, 1.2285, 1.4180], abs=1e-3
    )  # of the hash, so on every machine
    assert WordEncoder(2).truncated(["a red circle", "a red"]) == 1
    with pytest.raises(InvalidValueError, match="max_length"):
        WordEncoder(0)
