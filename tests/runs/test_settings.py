"""Every setting is documented, configs travel through YAML and JSON files, and misspelt names find their neighbours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scalelong.errors import DataError, InvalidValueError, UnknownNameError
from scalelong.runs.config import Config, known_keys, override
from scalelong.runs.settings import all_settings, read_config, to_yaml
from scalelong.scaling import ConstantScaling, LearnableScaling
from scalelong.training.presets import PRESETS, preset
from scalelong.training.start import start_from

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_of_settings_is_what_the_code_says():
    command = [sys.executable, "-m", "scalelong.runs.settings"]
    page = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    assert page == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")  # else: write it again


def test_every_setting_is_listed_once_with_a_meaning_and_its_default():
    listed = {setting.key: setting for setting in all_settings()}
    assert sorted(listed) == sorted([*known_keys(), "scaling"])
    assert [key for key, setting in listed.items() if not setting.meaning] == []
    for key, setting in listed.items():
        section, _, name = key.rpartition(".")
        values = Config().to_dict()
        (values[section] if section else values)[name] = setting.default
        assert Config.from_dict(values) == Config(), key


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_printed_as_yaml_or_json_is_read_back_as_the_same_config(tmp_path, name):
    (tmp_path / "a.yaml").write_text(to_yaml(preset(name)), encoding="utf-8")
    (tmp_path / "a.json").write_text(preset(name).to_json(), encoding="utf-8")
    assert yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8")) == json.loads(preset(name).to_json())
    for file in ("a.yaml", "a.json"):
        assert start_from(None, tmp_path / file).config == preset(name)


def test_a_file_may_hold_a_few_settings_and_options_take_precedence(tmp_path):
    file = tmp_path / "few.yml"
    file.write_text("train: {lr: 1e-3, clip: none, betas: [0.8, 0.9]}\nema.decay: 0.5\nscaling: cs\nkappa: 0.6\n")
    config = start_from("cifar10-tiny", file, {"train.steps": 7, "seed": None}).config
    assert (config.preset, config.data.name, config.train.steps) == ("cifar10-tiny", "cifar10", 7)
    assert (config.train.lr, config.train.clip, config.train.betas) == (1e-3, None, (0.8, 0.9))
    assert (config.ema.decay, config.scaling) == (0.5, ConstantScaling(0.6))
    file.write_text("preset: digits-class\nscaling: {kind: ls, reduction: 4}\nmodel.options: {width: 3}\n")
    config = start_from(None, file).config
    assert (config.preset, config.data.classes) == ("digits-class", True)
    assert config.scaling == LearnableScaling(reduction=4)
    assert config.model.options == {"width": 3}


def test_the_config_of_a_run_is_a_config_file(tmp_path):
    config = override(preset("digits"), {"train.lr": 0.5, "scaling": "ls"})
    (tmp_path / "config.json").write_text(json.dumps({"config": config.to_dict(), "parameters": 3}))
    assert start_from(None, tmp_path / "config.json").config == config


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("a.toml", "", InvalidValueError, r"a\.toml"),
        ("a.yaml", "a: [1", InvalidValueError, r"a\.yaml.*YAML.*line"),
        ("a.json", "{", InvalidValueError, r"a\.json.*JSON"),
        ("a.yaml", "- 1\n", InvalidValueError, r"a\.yaml.*\[1\]"),
        ("a.yaml", "", InvalidValueError, r"a\.yaml.*None"),
        ("a.yaml", "trian: {lr: 1}", UnknownNameError, r"'trian\.lr'; did you mean 'train\.lr'"),
        ("a.yaml", "train: {lr: fast}", InvalidValueError, r"train\.lr.*'fast'"),
        ("a.yaml", "train: {lr: {x: 1}}", InvalidValueError, r"train\.lr"),
        ("a.yaml", "train: 3", UnknownNameError, "'train'"),
        ("a.yaml", "1: 2", UnknownNameError, "'1'"),
        ("a.yaml", "preset: digit", UnknownNameError, "did you mean 'digits'"),
        ("a.yaml", "x: !!python/object/apply:os.getcwd []", InvalidValueError, r"a\.yaml"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_the_reason(tmp_path, name, text, error, match):
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=match) as caught:
        start_from(None, tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_and_a_preset_that_contradict_each_other_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("preset: digits\n")
    with pytest.raises(InvalidValueError, match=r"'digits'.*'cifar10-tiny'"):
        start_from("cifar10-tiny", tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="UTF-8"):
        read_config(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("lr", "train.lr"), ("learning_rate", "train.lr"), ("batchsize", "train.batch_size"), ("trian.lr", "train.lr"),
        ("train.batch-size", "train.batch_size"), ("grad_clip", "train.clip"), ("model.width", "model.embed_dim"),
        ("data.size", "data.image_size"), ("sampler", "sample.sampler"),
    ],
)  # fmt: skip
def test_a_misspelt_setting_names_the_three_nearest(key, nearest):
    with pytest.raises(UnknownNameError) as caught:
        override(preset("digits"), {key: 1})
    names = str(caught.value).split("'")[3:8:2]
    assert len(names) == 3
    assert set(names) <= {setting.key for setting in all_settings()}
    assert nearest in names
