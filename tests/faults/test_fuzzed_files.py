"""Any value in a scaling, in metadata, in a caption or in prepared data: it is used, or one sentence says why not."""

import json
import random
import shutil
import unicodedata
from contextlib import suppress

import numpy as np
import pytest
import torch
from fault_runs import DAMAGES, damage, places, planted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import scalelong
from scalelong import LearnableScaling
from scalelong.data import load
from scalelong.data.dataset import ImageData
from scalelong.data.records import clean_caption
from scalelong.errors import ScaleLongError

patient = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
VALUES = st.sampled_from(
    [None, True, 0, -1, 3, 10**400, 1.5, float("nan"), "", "x", "../x", "\x1b[31m", [], {}, [None], {"a": {}}, [[1]]]
)

NET = scalelong.UViT(img_size=8, patch_size=4, embed_dim=16, depth=4, num_heads=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    net = scalelong.UViT(
        img_size=8, patch_size=4, embed_dim=16, depth=4, num_heads=2, scaling=LearnableScaling(reduction=2)
    )
    scalelong.save_scaling(net, folder)
    return folder, json.loads((folder / "scaling.json").read_text())


@patient
@given(data=st.data())
def test_any_scaling_file_is_put_back_or_refused_and_the_network_is_as_it_was(saved, data):
    folder, record = saved
    place = data.draw(st.sampled_from(list(places(record))))
    (folder / "scaling.json").write_text(json.dumps(planted(record, place, data.draw(VALUES))))
    x, t = torch.ones(1, 3, 8, 8), torch.tensor([0.5])
    with torch.no_grad():
        before = NET(x, t)
        try:
            scalelong.load_scaling(NET, folder)
        except ScaleLongError:
            assert torch.equal(NET(x, t), before)  # refused: nothing was changed
        scalelong.remove(NET)
        assert torch.equal(NET(x, t), before)


@patient
@given(text=st.text(max_size=30) | st.text(st.characters(categories=["Cc", "Cf", "Zs", "Zl"]), max_size=5))
def test_a_caption_is_one_clean_line_or_refused(text):
    with suppress(ScaleLongError):
        kept = clean_caption(text, "one.png")
        assert not [c for c in kept if unicodedata.category(c) == "Cc"]
        assert kept == kept.strip()


ROW = {"file_name": "one.png", "text": "a cat", "label": 1}


@patient
@given(place=st.sampled_from(list(places(ROW))), other=VALUES, torn=st.booleans())
def test_any_metadata_is_used_or_refused(tmp_path_factory, place, other, torn):
    folder = tmp_path_factory.mktemp("meta")
    Image.new("RGB", (8, 8)).save(folder / "one.png")
    text = json.dumps(planted(ROW, place, other))
    (folder / "metadata.jsonl").write_text(text[: len(text) // 2] if torn else text + "\n")
    with suppress(ScaleLongError):
        assert len(load(str(folder))) == 1
    shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------ prepared data


def use(folder):
    """Everything that training and the report read of prepared data."""
    data = ImageData(folder)
    data.batch(range(len(data)))
    if data.labels is not None:
        data.label_batch(range(len(data)))
    if data.captions is not None:
        list(data.captions)
    data.verify()
    return data


def go_through_prepared(tmp_path, rounds, seed):
    """Damage every file of prepared data in every way: read as it was, or refused. Returns how often each."""
    rng, outcomes = random.Random(seed), []
    arrays = {"images": np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)}
    np.savez(tmp_path / "set.npz", **arrays, labels=np.arange(6) % 3)
    whole = load(str(tmp_path / "set.npz"))
    expected, copy = whole.batch(range(6)), tmp_path / "copy"
    names = sorted(path.name for path in whole.folder.iterdir() if path.is_file())
    for name in names:
        for kind in DAMAGES * rounds:
            shutil.copytree(whole.folder, copy)
            damage(copy / name, kind, rng)
            try:
                data = use(copy)
                assert torch.equal(data.batch(range(6)), expected), (name, kind)
                outcomes.append("as it was")
            except ScaleLongError:
                outcomes.append("refused")
            shutil.rmtree(copy)
    return outcomes


def test_prepared_data_with_damage_is_as_it_was_or_refused(tmp_path):
    go_through_prepared(tmp_path, 1, 1)


@pytest.mark.slow
def test_prepared_data_with_much_damage_is_as_it_was_or_refused(tmp_path, note):
    outcomes = go_through_prepared(tmp_path, 20, 2)
    happened = f"refused with an error: {outcomes.count('refused')}; read as it was: {outcomes.count('as it was')}"
    note("malformed input", "prepared data: every file damaged in every way, then verified", len(outcomes), happened)
