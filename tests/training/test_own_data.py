"""Training on data that no preset was made for: what is picked, what is prepared, and what the run remembers."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from scalelong import load_run
from scalelong.data import load
from scalelong.data.prepare import absolute_name
from scalelong.data.survey import Survey, survey
from scalelong.errors import DataError, InvalidValueError, RunError
from scalelong.runs.config import DataConfig, override
from scalelong.training import own_data, preset, train
from scalelong.training.examples import Examples, check_classes
from scalelong.training.observers import held_out_examples
from scalelong.training.presets import AUTO, choose, default_out
from scalelong.training.start import start_from

TINY = {"model.channels": (8, 8, 8), "train.steps": 2, "train.batch_size": 4, "sample.n": 4, "sample.steps": 2,
        "monitor.every": 0, "validate.n": 4}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))


def write(folder, count=12, size=(20, 16), mode="RGB", suffix="png", classes=()):
    rng = np.random.default_rng(count)
    for k in range(count):
        home = folder / classes[k % len(classes)] if classes else folder
        home.mkdir(parents=True, exist_ok=True)
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
        Image.frombytes(mode, size, pixels.tobytes()).save(home / f"{k}.{suffix}")
    return folder


def facts(**changes):
    usual = {"images": 5000, "width": 640, "height": 480, "side": 480, "one_size": False, "grey": False}
    return Survey(**{**usual, "transparent": False, **changes})


def picked(**changes):
    seen = own_data.Seen(facts(**changes), {}, ())
    return own_data.pick(seen, DataConfig(), preset("digits")).settings


# ------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("side", "one_size", "size", "channels"),
    [
        (3, True, 8, (64, 128, 128)), (10, True, 10, (64, 128)), (11, False, 8, (64, 128, 128)),
        (22, False, 20, (32, 64, 128)), (30, False, 28, (32, 64, 64)), (480, False, 32, (32, 64, 64)),
    ],
)  # fmt: skip
def test_the_size_of_the_images_decides_image_size_and_network(side, one_size, size, channels):
    settings = picked(side=side, one_size=one_size)
    assert (settings["data.image_size"], settings["model.kind"]) == (size, "unet")
    assert settings["model.channels"] == channels


def test_steps_follow_from_cost_and_number_of_images():
    few, some, many = (picked(images=n, side=8)["train.steps"] for n in (10, 200, 100_000))
    assert few == own_data.STEPS[0]
    assert some == 500 * 200 // preset("digits").train.batch_size // 100 * 100  # 500 epochs
    assert some < many <= own_data.STEPS[1]
    assert picked(images=100_000, side=480)["train.steps"] < many  # larger images, fewer steps


def test_captions_or_classes_condition_the_network():
    names = ("a", "b", "c")
    assert picked(captions=True, class_names=names)["data.text"] == "minilm"
    assert picked(captions=True, class_names=names)["model.attention"] is None  # the default, which attends to text
    assert picked(class_names=names)["data.classes"] is True
    assert "data.classes" not in picked(class_names=names, images=29)
    assert "data.classes" not in picked(class_names=("all",))
    assert not {"data.classes", "data.text"} & set(picked())


def test_captions_without_their_encoder_are_ignored_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr(own_data, "find_spec", lambda name: None)
    fit = own_data.pick(own_data.Seen(facts(captions=True), {}, ()), DataConfig(), preset("digits"))
    assert "data.text" not in fit.settings
    assert any("scalelong[text]" in note for note in fit.notes)


def test_the_survey_reads_headers(tmp_path):
    folder = write(tmp_path / "mixed", 5, (20, 16), classes=("猫", "a dog"))
    write(tmp_path / "mixed" / "猫", 1, (40, 60), "RGBA", "webp")
    (tmp_path / "mixed" / "猫" / "broken.png").write_bytes(b"no image")
    found = survey(str(folder))
    assert (found.images, found.side, found.one_size) == (6, 16, False)
    assert (found.grey, found.transparent, found.class_names) == (False, True, ("a dog", "猫"))
    grey = survey(str(write(tmp_path / "grey", 4, (12, 12), "L")))
    assert (grey.grey, grey.one_size, grey.side, grey.class_names) == (True, True, 12, None)
    np.savez(tmp_path / "a.npz", images=np.zeros((7, 6, 6, 1), np.uint8), labels=np.arange(7) % 2)
    array = survey(str(tmp_path / "a.npz"))
    assert (array.images, array.side, array.grey, array.class_names) == (7, 6, True, ("0", "1"))
    assert survey("cifar10").images == 50_000


# --------------------------------------------------------------------------------------- with a preset


def test_a_preset_keeps_its_image_size_unless_the_images_have_one_of_their_own(tmp_path):
    photos, icons = write(tmp_path / "photos"), write(tmp_path / "icons", size=(24, 24))
    size = lambda name, folder, **options: (
        start_from(name, options={"data.name": str(folder), **options}).config.data.image_size
    )
    assert size("cifar10-tiny", write(tmp_path / "large", size=(50, 40))) == 32
    assert size("digits", photos) == 8
    assert size("digits", icons) == 24
    assert size("cifar10-tiny", photos) == 16  # smaller than the preset's: not enlarged
    assert size("cifar10-tiny", photos, **{"data.image_size": 20}) == 20


def test_a_preset_takes_the_channels_of_the_images_and_says_so(tmp_path):
    grey, color = write(tmp_path / "grey", mode="L", size=(8, 8)), write(tmp_path / "color", mode="RGBA", size=(8, 8))
    start = start_from("digits", options={"data.name": str(color)})
    assert (start.config.data.channels, start.config.data.background) == (3, "white")
    assert any("8×8×1" in note and "8×8×3" in note for note in start.notes)
    assert start_from("digits", options={"data.name": str(grey)}).config.data.channels == 1
    assert start_from("digits", options={"data.name": "cifar10"}).config.data.image_size is None  # as ever


# -------------------------------------------------------------------------- what was prepared is trained on


def prepare(*words):
    from scalelong.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["data", "prepare", *map(str, words)])
    assert not ended.value.code


def test_what_was_prepared_is_what_gets_trained_on(tmp_path, monkeypatch):
    folder = write(tmp_path / "photos", 40)
    (folder / "broken.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    prepare("photos", "--image-size", 12, "--holdout", 0.2, "--skip-bad", "--channels", 1)
    for name in (None, "digits"):
        data = start_from(name, options={"data.name": "photos/"}).config.data
        assert (data.image_size, data.holdout, data.skip_bad, data.channels) == (12, 0.2, True, 1)
    other = start_from(options={"data.name": "photos", "data.image_size": 16, "data.skip_bad": True}).config.data
    assert (other.image_size, other.holdout, other.channels) == (16, 0.0, 3)
    prepare("photos", "--image-size", 8, "--skip-bad")
    assert start_from(options={"data.name": "photos"}).config.data.image_size == 8
    write(folder, 1, (30, 30))  # the folder changed, so what was prepared is not it any more
    assert start_from(options={"data.name": "photos"}).config.data.image_size == 16


# ---------------------------------------------------------------------------------- the run remembers all


def chosen(folder, **options):
    given = {"data.name": str(folder), **options}
    start = start_from(options=given, settings=[f"{k}={_text(v)}" for k, v in TINY.items()])
    return start, override(start.config, TINY)


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def test_a_run_on_a_folder_resumes_and_is_evaluated_from_anywhere(tmp_path, monkeypatch):
    write(tmp_path / "photos", 30, mode="RGBA")
    monkeypatch.chdir(tmp_path)
    start, config = chosen("photos", **{"data.holdout": 0.2})
    assert config.preset == AUTO
    assert default_out(config).name == "photos-none-seed0"
    train(config, tmp_path / "run", quiet=True)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["data"]
    assert stored["name"] == str(tmp_path / "photos")
    assert (stored["image_size"], stored["channels"], stored["background"], stored["holdout"]) == (16, 3, "white", 0.2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    prepare(tmp_path / "photos", "--image-size", 8, "--background", "black")
    again, config = chosen(tmp_path / "photos", **{"data.holdout": 0.2})
    longer = override(again.resumed(load_run(tmp_path / "run").config), {**TINY, "train.steps": 4})
    assert train(longer, tmp_path / "run", quiet=True).step == 4
    write(tmp_path / "photos", 31)
    with pytest.raises(RunError, match="fingerprint"):
        train(longer, tmp_path / "run", quiet=True)


def test_a_moved_folder_with_the_same_images_resumes(tmp_path):
    write(tmp_path / "one", 10)
    _, config = chosen(tmp_path / "one")
    train(config, tmp_path / "run", quiet=True)
    shutil.move(tmp_path / "one", tmp_path / "two")
    _, moved = chosen(tmp_path / "two")
    assert train(override(moved, {"train.steps": 3}), tmp_path / "run", quiet=True).step == 3


def test_a_captioned_folder_without_a_validation_split_trains_and_samples(tmp_path):
    folder = write(tmp_path / "words", 12, (8, 8))
    rows = "".join(f"{k}.png,a picture of {k}\n" for k in range(12))
    (folder / "metadata.csv").write_text("file_name,text\n" + rows)
    _, config = chosen(folder)
    assert config.data.text == "minilm"
    run = train(config, tmp_path / "run", quiet=True).run
    assert (run.samples_path / "step-00000002.png").is_file()


def test_one_image_is_worth_a_remark(tmp_path, capsys):
    _, config = chosen(write(tmp_path / "one", 1, (8, 8)))
    train(config, tmp_path / "run")
    assert "1 image" in capsys.readouterr().err
    assert len(load(tmp_path / "one")) == 1


def test_only_a_missing_validation_split_is_left_out(tmp_path, capsys):
    """A broken file or a misspelt split is an error, as in the training images."""
    write(tmp_path / "set" / "train")
    config = override(preset("digits"), {**TINY, "data.name": str(tmp_path / "set"), "validate.every": 0})
    assert held_out_examples(config) is None
    assert "no validation" in capsys.readouterr().err
    with pytest.raises(DataError, match="no split 'vall'"):
        held_out_examples(override(config, {"data.validation": "vall"}))
    (tmp_path / "set" / "val").mkdir()
    (tmp_path / "set" / "val" / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="a.png"):
        held_out_examples(config)


def test_classes_of_the_splits_must_agree(tmp_path):
    for split, classes in (("train", ("cat", "dog")), ("val", ("cat", "dog"))):
        write(tmp_path / "set" / split, classes=classes)
    settings = {**TINY, "data.name": str(tmp_path / "set"), "data.classes": True, "data.image_size": 16}
    training, held_out = (Examples(override(preset("digits"), settings), split) for split in ("train", "val"))
    check_classes(training, held_out)
    held_out.images.class_names = ("dog", "cat")
    with pytest.raises(DataError, match="dog, cat"):
        check_classes(training, held_out)


@pytest.mark.parametrize(
    ("options", "kind", "kappa"),
    [
        ({"kappa": 0.5}, "cs", 0.5),
        ({"settings": ["scaling=cs"]}, "cs", 0.7),
        ({"settings": ["scaling=cs"], "kappa": 0.4}, "cs", 0.4),
        ({"settings": ["scaling=ls"], "scaling": "none"}, "ls", None),
        ({"settings": ["kappa=0.3"], "kappa": 0.4, "scaling": "cs"}, "cs", 0.3),
        ({"settings": ["kappa=0.3"]}, "none", None),
        ({"settings": ["kappa=0.3"], "start": "cs:0.4"}, "cs", 0.3),
        ({"kappa": 0.3, "start": "uniform"}, "uniform", None),
    ],
)
def test_kappa_and_scaling_may_be_options_or_settings(options, kind, kappa):
    start = choose("digits", scaling=options.pop("start", None))
    spec = choose(start, **options).scaling
    assert (spec.kind, getattr(spec, "kappa", None)) == (kind, kappa)


@pytest.mark.parametrize("start", ["ls", "none"])
def test_kappa_never_replaces_another_scaling(start):
    with pytest.raises(InvalidValueError, match="kappa"):
        choose(choose("digits", scaling=start), kappa=0.5, settings=["scaling=ls"])
    with pytest.raises(InvalidValueError, match="kappa"):
        choose(choose("digits", scaling="ls"), kappa=0.5)


def test_paths_of_settings_and_saved_datasets_are_stored_absolute(tmp_path, monkeypatch):
    write(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    assert choose("digits", settings=["data.name=photos"]).data.name == str(tmp_path / "photos")
    assert choose("digits", settings=["data.name=cifar10"]).data.name == "cifar10"
    assert absolute_name("hf:photos") == f"hf:{tmp_path / 'photos'}"
    assert absolute_name("hf:owner/name") == "hf:owner/name"


def test_a_file_of_settings_is_read_like_the_options_it_stands_for(tmp_path):
    for text, message in [
        ("preset: digits\nmodel:\n  depth: 4\n", "model.depth has no effect"),
        ("preset: digits\ndiffusion:\n  snr_gamma: 3\n", "diffusion.snr_gamma has no effect"),
    ]:
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(InvalidValueError, match=message):
            start_from(file=tmp_path / "a.yaml")
    (tmp_path / "flow.yaml").write_text("preset: cifar10-uvit-s\ndiffusion:\n  objective: flow\n")
    assert start_from(file=tmp_path / "flow.yaml").config == choose("cifar10-uvit-s", objective="flow")
