"""Configs: dotted keys, JSON, presets, scalings, and what a resumed run may change."""

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.errors import InvalidValueError, ScaleLongError, UnknownNameError
from scalelong.runs.config import Config, differences, flatten, known_keys, override, parse_settings
from scalelong.scaling import ConstantScaling, LearnableScaling, NoScaling
from scalelong.training.presets import PRESETS, choose, default_out, preset, size_of, sizes
from scalelong.training.start import start_from


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_json(name):
    config = preset(name)
    assert Config.from_dict(json.loads(config.to_json())) == config
    assert config.preset == name


@pytest.mark.parametrize("name", PRESETS)
def test_stored_sizes_of_presets_are_correct(name):
    stored = {key: value for key, value in sizes()[name].items() if key != "activations"}
    assert stored == size_of(preset(name))  # else: python -m scalelong.training.presets


def test_presets_are_listed_without_importing_torch():
    code = (
        "import sys; from scalelong.training.presets import PRESETS, sizes; sizes(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_row_of_the_papers_table_is_a_preset():
    rows = {
        "cifar10-uvit-s": (512, 12, 128, 500_000, 2500, 2e-4, (0.99, 0.999), 0.5),
        "celeba64-uvit-s": (512, 12, 128, 500_000, 4000, 2e-4, (0.99, 0.99), 0.5),
        "imagenet64-uvit-m": (768, 16, 1024, 300_000, 5000, 3e-4, (0.99, 0.99), 0.7),
        "imagenet64-uvit-l": (1024, 20, 1024, 300_000, 5000, 3e-4, (0.99, 0.99), 0.7),
        "coco-uvit-s": (512, 12, 256, 1_000_000, 5000, 2e-4, (0.9, 0.9), 0.8),
    }
    for name, (width, depth, batch, steps, warmup, lr, betas, kappa) in rows.items():
        c, t = preset(name), preset(name).train
        assert (c.model.embed_dim, c.model.depth, c.kappa, c.ema.decay) == (width, depth, kappa, 0.9999)
        assert (t.batch_size, t.steps, t.warmup, t.lr, t.betas, t.weight_decay) == (
            batch, steps, warmup, lr, betas, 0.03,
        )  # fmt: skip
    for name, kappa in {"cifar10-unet": 0.5, "imagenet64-unet": 0.7, "coco-unet": 0.8}.items():
        assert preset(name).kappa == kappa


# ------------------------------------------------------------------------------------------ dotted keys


def test_text_is_converted_to_the_type_of_its_key():
    settings = {
        "train.lr": "1e-4", "train.betas": "0.9,0.95", "train.clip": "none", "data.flip": "yes",
        "train.steps": "1_000", "model.options": '{"width": 8}', "model.options.blocks": "[1, 2]",
    }  # fmt: skip
    config = override(preset("digits-uvit"), settings)
    assert (config.train.lr, config.train.betas, config.train.clip) == (1e-4, (0.9, 0.95), None)
    assert config.data.flip is True
    assert config.train.steps == 1000
    assert config.model.options == {"width": 8, "blocks": [1, 2]}


@pytest.mark.parametrize(
    ("key", "value", "error", "match"),
    [
        ("train.lrr", "1", UnknownNameError, "did you mean 'train.lr'"),
        ("trian.lr", "1", UnknownNameError, "did you mean 'train.lr'"),
        ("lr", "1", UnknownNameError, "'lr'"),
        ("train", "1", UnknownNameError, "'train'"),
        ("train.lr.x", "1", UnknownNameError, "'train.lr.x'"),
        ("preset", "x", UnknownNameError, "'preset'"),
        ("train.lr", "fast", InvalidValueError, "train.lr.*'fast'"),
        ("train.lr", "nan", InvalidValueError, "train.lr.*'nan'"),
        ("train.lr", "-1", InvalidValueError, "train.lr.*-1"),
        ("train.steps", "1.5", InvalidValueError, "train.steps.*'1.5'"),
        ("train.steps", "0", InvalidValueError, "train.steps.*0"),
        ("train.steps", str(2**64), InvalidValueError, "train.steps.*less"),
        ("data.flip", "maybe", InvalidValueError, "data.flip.*'maybe'"),
        ("train.betas", "0.9", InvalidValueError, "train.betas"),
        ("train.betas", "0.9,1.0", InvalidValueError, "train.betas.*1.0"),
        ("train.weight_decay", "-1", InvalidValueError, "train.weight_decay.*-1"),
        ("train.precision", "fp8", UnknownNameError, "'fp8'"),
        ("ema.decay", "1", InvalidValueError, "ema.decay.*1"),
        ("diffusion.process", "vpp", UnknownNameError, "did you mean 'vp'"),
        ("tracker", "tensorbord", UnknownNameError, "did you mean 'tensorboard'"),
        ("model.kind", "mine", UnknownNameError, r"'mine'.*MODELS\['mine'\]"),
        ("model.options", "[1]", InvalidValueError, "model.options"),
        ("model.options", {"f": print}, InvalidValueError, "model.options"),
        ("scaling", "css", UnknownNameError, "did you mean 'cs'"),
        ("seed", "-1", InvalidValueError, "seed.*-1"),
        ("monitor.every", "-1", InvalidValueError, "monitor.every.*-1"),
        ("monitor.samples", "0", InvalidValueError, "monitor.samples.*0"),
        ("sample.steps", "-3", InvalidValueError, "sample.steps.*-3"),
        ("data.latent_scale", "0.0", InvalidValueError, "data.latent_scale.*0.0"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_key_and_value(key, value, error, match):
    with pytest.raises(error, match=match):
        override(preset("digits-uvit"), {key: value})


@pytest.mark.parametrize(
    ("key", "value", "reader"),
    [
        ("diffusion.drop", 0.1, {"data.classes": True}),
        ("sample.guidance", 3.0, {"data.text": "words"}),
        ("data.text_tokens", 8, {"data.text": "words"}),
        ("data.latent_scale", 0.2, {"data.vae": "some-autoencoder"}),
        ("train.min_lr_ratio", 0.1, {"train.schedule": "cosine"}),
        ("train.decay_share", 0.5, {"train.schedule": "warmup-stable-decay"}),
        ("distillation.temperature", 0.1, {"distillation.weight": 0.1}),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(key, value, reader):
    base = preset("digits-uvit")
    with pytest.raises(InvalidValueError, match=f"{key} has no effect here: only .*{next(iter(reader))}"):
        override(base, {key: value})
    override(base, {key: value, **reader})
    override(base, {key: flatten(base.to_dict())[key]})  # its default changes nothing


def test_one_setting_of_a_presets_text_may_change():
    start = start_from("shapes", settings=["data.text_tokens=8"])
    assert choose(start.config, settings=["data.text_tokens=8"]).data.text_tokens == 8


def test_a_network_is_conditioned_on_classes_or_text_not_both():
    with pytest.raises(InvalidValueError, match=r"data\.classes.*data\.text"):
        override(preset("emoji-tiny"), {"data.classes": True})


@pytest.mark.parametrize("pair", ["train.lr", "=3", ""])
def test_a_setting_without_key_or_value_is_refused(pair):
    with pytest.raises(InvalidValueError, match=r"dotted\.key=value"):
        parse_settings([pair])


@given(key=st.sampled_from(known_keys()), value=st.text(max_size=12))
def test_any_text_gives_a_config_or_our_error(key, value):
    try:
        config = override(preset("digits-uvit"), {key: value})
    except ScaleLongError:
        return
    assert Config.from_dict(json.loads(config.to_json())) == config


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["train", "lr", "data", "seed", "scaling"]), x),
)


@given(ANY_JSON)
def test_any_json_gives_a_config_or_our_error(values):
    with contextlib.suppress(ScaleLongError):
        Config.from_dict(values)


def test_only_length_logging_and_output_may_change_on_resume():
    a = preset("digits-uvit")
    free = {"train.steps": 9, "train.log_every": 3, "checkpoint.every": 7, "sample.n": 1, "validate.every": 2}
    free |= {"train.accumulate": 4, "train.gradient_checkpointing": True, "train.parallel": "fsdp"}  # the same steps
    assert differences(a, override(a, free)) == []
    assert a.train.precision == "auto"
    assert differences(override(a, {"train.precision": "fp32"}), a) == []  # the one that the run started with
    assert differences(override(a, {"train.precision": "fp32"}), override(a, {"train.precision": "bf16"})) != []
    changed = differences(a, override(a, {"train.lr": "2e-3", "seed": 4, "scaling": "ls"}))
    assert changed[0].startswith("scaling.activation: None →")
    assert [line for line in changed if not line.startswith("scaling")] == ["seed: 0 → 4", "train.lr: 0.001 → 0.002"]


# -------------------------------------------------------------------------------- a command's options


def test_the_options_of_a_command_make_a_config():
    c = choose("cifar10-tiny", scaling="cs", steps=10, batch_size=4, seed=3, data="digits", settings=["train.lr=0.5"])
    assert c.scaling == ConstantScaling(0.7)  # the preset's κ
    assert (c.train.steps, c.train.batch_size, c.seed, c.data.name, c.train.lr) == (10, 4, 3, "digits", 0.5)
    assert choose("digits", kappa=0.9).scaling == ConstantScaling(0.9)
    assert choose("digits").scaling == NoScaling()
    with pytest.raises(UnknownNameError, match="did you mean 'digits'"):
        choose("digit")


def test_the_default_folder_names_preset_scaling_and_seed():
    words = ["none", "uniform", "cs", "cs-reverse", "ls", "stable", "rezero"]
    names = [default_out(choose("digits", scaling=word, seed=2)).as_posix() for word in words]
    labels = ["none", "uniform", "cs-0.7", "cs-reverse-0.7", "ls", "stable-0.1", "rezero"]
    assert names == [f"runs/digits-{label}-seed2" for label in labels]


def test_fields_of_a_scaling_are_set_by_their_names():
    config = choose("digits", scaling="ls", settings=["scaling.reduction=4", "scaling.activation=mish"])
    assert config.scaling == LearnableScaling(reduction=4, activation="mish")
    assert choose("digits", scaling="stable", settings=["scaling.tau=0.3"]).scaling.tau == 0.3


@pytest.mark.parametrize(
    ("scaling", "setting", "error", "match"),
    [
        ("ls", "scaling.reducton=4", UnknownNameError, r"did you mean 'scaling\.reduction'"),
        ("none", "scaling.tau=0.3", UnknownNameError, r"scaling\.tau"),
        ("ls", "scaling.reduction=four", InvalidValueError, r"scaling\.reduction.*'four'"),
        ("ls", "scaling.activation=relish", UnknownNameError, "'relish'"),
    ],
)
def test_an_invalid_field_of_a_scaling_is_refused(scaling, setting, error, match):
    with pytest.raises(error, match=match):
        choose("digits", scaling=scaling, settings=[setting])
