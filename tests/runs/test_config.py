"""Configs: dotted keys, JSON, presets, and what a resumed run may change."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.errors import ScaleLongError
from scalelong.runs.config import Config, differences, known_keys, override, parse_settings
from scalelong.scaling import parse_scaling
from scalelong.training.choose import choose, default_out
from scalelong.training.presets import PRESETS, preset, sizes
from scalelong.training.sizes import size_of


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_json(name):
    config = preset(name)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_of_a_preset_s_size_is_so(name):
    assert sizes()[name] == size_of(preset(name))  # else: python -m scalelong.training.sizes


def test_every_row_of_the_papers_table_is_there():
    rows = {
        "cifar10-uvit-s": (512, 12, 128, 500_000, 2500, 2e-4, (0.99, 0.999), 0.5),
        "celeba64-uvit-s": (512, 12, 128, 500_000, 4000, 2e-4, (0.99, 0.99), 0.5),
        "imagenet64-uvit-m": (768, 16, 1024, 300_000, 5000, 3e-4, (0.99, 0.99), 0.7),
        "imagenet64-uvit-l": (1024, 20, 1024, 300_000, 5000, 3e-4, (0.99, 0.99), 0.7),
        "coco-uvit-s": (512, 12, 256, 1_000_000, 5000, 2e-4, (0.9, 0.9), 0.8),
    }
    for name, (width, depth, batch, steps, warmup, lr, betas, kappa) in rows.items():
        c = preset(name)
        assert (c.model.embed_dim, c.model.depth) == (width, depth)
        t = c.train
        assert (t.batch_size, t.steps, t.warmup, t.lr, t.betas, t.weight_decay) == (
            batch,
            steps,
            warmup,
            lr,
            betas,
            0.03,
        )
        assert c.kappa == kappa
        assert c.ema.decay == 0.9999
    for name, kappa in {"cifar10-unet": 0.5, "imagenet64-unet": 0.7, "coco-unet": 0.8}.items():
        assert preset(name).kappa == kappa


def test_text_is_read_as_the_type_of_its_key():
    config = override(
        preset("digits"),
        {
            "train.lr": "1e-4",
            "train.betas": "0.9,0.95",
            "train.clip": "none",
            "data.flip": "yes",
            "train.steps": "1_000",
        },
    )
    assert (config.train.lr, config.train.betas, config.train.clip) == (1e-4, (0.9, 0.95), None)
    assert config.data.flip is True
    assert config.train.steps == 1000


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("train.lrr", "1", "did you mean 'train.lr'"),
        ("trian.lr", "1", "did you mean 'train.lr'"),
        ("lr", "1", "unknown setting 'lr'"),
        ("train", "1", "unknown setting 'train'"),
        ("train.lr.x", "1", "unknown setting"),
        ("train.lr", "fast", r"train.lr takes a number, not 'fast'"),
        ("train.lr", "nan", "takes a number"),
        ("train.lr", "-1", "above 0"),
        ("train.steps", "1.5", "whole number"),
        ("train.steps", "0", "at least 1"),
        ("data.flip", "maybe", "true or false"),
        ("train.betas", "0.9", "numbers with commas"),
        ("train.betas", "0.9,1.0", r"\[0, 1\)"),
        ("train.precision", "fp8", "unknown train.precision"),
        ("ema.decay", "1", r"\[0, 1\)"),
        ("diffusion.process", "vpp", "did you mean 'vp'"),
        ("tracker", "tensorbord", "did you mean 'tensorboard'"),
        ("seed", "-1", "at least 0"),
        ("monitor.every", "-1", "at least 0"),
        ("monitor.samples", "0", "monitor.samples is at least 1, not 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(key, value, match):
    with pytest.raises(ScaleLongError, match=match):
        override(preset("digits"), {key: value})


@pytest.mark.parametrize("pair", ["train.lr", "=3", ""])
def test_a_setting_without_a_value_is_refused(pair):
    with pytest.raises(ScaleLongError, match="dotted.key=value"):
        parse_settings([pair])


@given(key=st.sampled_from(known_keys()), value=st.text(max_size=12))
def test_any_text_gives_a_config_or_a_sentence(key, value):
    try:
        config = override(preset("digits"), {key: value})
    except ScaleLongError:
        return
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["train", "lr", "data", "seed"]), x),
)


@given(ANY_JSON)
def test_any_json_gives_a_config_or_a_sentence(values):
    with contextlib.suppress(ScaleLongError):
        Config.from_dict(values)


def test_only_length_logging_and_output_may_change_on_resume():
    a = preset("digits")
    free = {"train.steps": 9, "train.log_every": 3, "checkpoint.every": 7, "sample.n": 1, "validate.every": 2}
    assert differences(a, override(a, free)) == []
    changed = differences(a, override(a, {"train.lr": "2e-3", "seed": 4}))
    assert len(changed) == 2
    assert changed[0] == "seed: 0 → 4"
    assert changed[1].startswith("train.lr: 0.001 →")


def test_the_commands_words_make_a_config():
    c = choose("cifar10-tiny", scaling="cs", steps=10, batch_size=4, seed=3, data="digits", settings=["train.lr=0.5"])
    assert c.scaling == {"kind": "cs", "kappa": 0.7, "reverse": False}  # the preset's κ
    assert (c.train.steps, c.train.batch_size, c.seed, c.data.name, c.train.lr) == (10, 4, 3, "digits", 0.5)
    assert choose("digits", kappa=0.9).scaling["kappa"] == 0.9
    assert str(default_out(choose("digits", scaling="cs", kappa=0.5, seed=2))).endswith("digits-cs-0.5-seed2")
    assert choose("digits").scaling == {"kind": "none"}
    with pytest.raises(ScaleLongError, match="did you mean 'digits'"):
        choose("digit")


def test_labels_of_scalings_are_short_and_distinct():
    words = ["none", "uniform", "cs", "cs-reverse", "ls", "stable", "rezero"]
    labels = [parse_scaling(choose("digits", scaling=word).scaling).label for word in words]
    assert labels == ["none", "uniform", "cs-0.7", "cs-reverse-0.7", "ls", "stable-0.1", "rezero"]
