"""Images from a run: seeds by image, classes, prompts, and the sample command."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scalelong import LearnableScaling, load_run
from scalelong.cli import main
from scalelong.diffusion import RangeCheck
from scalelong.errors import InvalidValueError, UnknownNameError
from scalelong.runs.config import override
from scalelong.runs.generate import Request, generate, grid_columns, label_of
from scalelong.training.loop import train
from tiny_runs import tiny_config

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "class"
    train(tiny_config("digits-uvit-class", train__steps=2, scaling=LearnableScaling()), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(tiny_config(train__steps=2), folder, quiet=True)
    return folder


def images(folder, **options):
    trained = load_run(folder)
    request = Request(**{"sampler": "dpm-solver-fast", "steps": 4, **options})
    return np.concatenate(list(generate(trained.net, trained.config, trained.facts, request)))


def test_the_batch_size_and_the_start_never_change_an_image(plain):
    whole = images(plain, n=6)
    assert whole.shape == (6, 8, 8, 1)
    assert whole.dtype == np.uint8
    assert np.abs(whole.astype(int) - images(plain, n=6, batch_size=4)).max() <= 1  # rounding of another matmul shape
    assert np.abs(whole[2:5].astype(int) - images(plain, n=3, first=2)).max() <= 1
    assert np.array_equal(whole, images(plain, n=6))
    assert not np.array_equal(whole, images(plain, n=6, seed=1))


def test_classes_alternate_or_follow_the_request(by_class):
    trained = load_run(by_class)
    assert trained.facts.null_y == 10
    assert trained.facts.shapes.label_rows == 11
    assert images(by_class, n=4, classes=["3"], guidance=2.0).shape == (4, 8, 8, 1)
    same = images(by_class, n=2, classes=[0, 1])
    assert np.array_equal(images(by_class, n=2), same)  # 0, 1, … in turn


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"classes": [10]}, InvalidValueError, "class.*9.*10"),
        ({"classes": ["horse"]}, UnknownNameError, "'horse'"),
        ({"precision": "fp8"}, UnknownNameError, "'fp8'"),
        ({"prompts": ["a sun"]}, InvalidValueError, "no text.*a sun"),
    ],
)
def test_conditions_that_the_run_does_not_have_are_refused(by_class, options, error, match):
    with pytest.raises(error, match=match):
        images(by_class, n=1, **options)


def test_classes_are_refused_by_a_run_without_classes(plain):
    with pytest.raises(InvalidValueError, match="no classes.*0"):
        images(plain, n=1, classes=[0])


def test_names_and_numbers_of_classes():
    assert label_of("cat", ["dog", "cat"]) == 1
    assert label_of("0", ["dog", "cat"]) == 0


def test_the_sample_command_writes_a_grid_or_a_folder(tmp_path, plain, capsys):
    for arguments in (["--out", str(tmp_path / "grid.png")], ["--out", str(tmp_path / "folder"), "--first", "3"]):
        with pytest.raises(SystemExit) as left:
            main(["sample", str(plain), "--n", "5", "--steps", "3", *arguments])
        assert left.value.code == 0
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.size[0] > 500
    assert sorted(p.name for p in (tmp_path / "folder").glob("*.png")) == [f"{k:06d}.png" for k in range(3, 8)]
    with Image.open(tmp_path / "folder" / "000003.png") as image:
        assert image.size == (8, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "nowhere"], "nowhere is not a run folder"),
        (["sample", "RUN", "--sampler", "dpm"], "unknown sampler 'dpm'"),
        (["sample", "RUN", "--n", "0"], "--n must be an integer >= 1, got 0"),
        (["sample", "RUN", "--device", "tpu9"], "device 'tpu9'"),
        (["train", "digit"], "did you mean 'digits'"),
        (["train", "--scaling", "css"], "did you mean 'cs'"),
        (["train", "--kappa", "-1"], "kappa"),
        (["train", "--set", "train.lr"], "dotted.key=value"),
        (["train", "--data", "/nowhere/at/all", "--out", "RUN-x"], "/nowhere/at/all"),
    ],
)
def test_commands_report_errors_in_one_line(tmp_path, plain, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main([str(plain) if a == "RUN" else a for a in arguments])
    assert left.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_dry_run_prints_the_resolved_config(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "cifar10-tiny", "--scaling", "cs", "--dry-run"])
    assert left.value.code == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["scaling"] == {"kind": "cs", "kappa": 0.7, "reverse": False}
    assert "runs/cifar10-tiny-cs-0.7-seed0" in out.err


def test_presets_are_listed_with_their_cost(capsys):
    with pytest.raises(SystemExit):
        main(["presets", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cifar10-uvit-s"]["parameters"] == pytest.approx(44e6, rel=0.02)
    assert rows["cifar10-unet"]["skips"] == 12
    # a forward pass of a transformer costs about 2 FLOP a weight and token, a step three times that
    assert rows["cifar10-uvit-s"]["flop_per_step"] == pytest.approx(6 * 44e6 * 257 * 128, rel=0.15)


def test_a_grid_has_a_column_for_each_class(by_class, plain, tmp_path):
    for run, options, columns in ((by_class, [], 10), (by_class, ["--class", "3"], 5), (plain, [], 5)):
        with pytest.raises(SystemExit):
            main(["sample", str(run), "--n", "20", "--steps", "1", *options, "--out", str(tmp_path / "grid.png")])
        with Image.open(tmp_path / "grid.png") as sheet:
            width, height = sheet.size
        rows = -(-20 // columns)
        assert width * (9 * rows + 1) == height * (9 * columns + 1)  # images of 8 pixels, lines of one between them


def test_a_grid_has_a_column_for_each_prompt(plain):
    facts = load_run(plain).facts
    asked = [
        ["a sun"],
        ["a sun", "a moon"],
        ["a sun", "a moon", "a star", "a cat", "a dog"],
        [str(k) for k in range(21)],
    ]
    assert [grid_columns(facts, Request(n=4, prompts=prompts)) for prompts in asked] == [None, 2, None, None]
    assert grid_columns(facts, Request(n=20, prompts=asked[2])) == 5
    assert grid_columns(facts, Request(n=64, prompts=asked[1])) == 8  # not two columns of 32 rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("digits-uvit-class", {"train__steps": 2000, "model__embed_dim": 64, "model__depth": 12, "model__num_heads": 4})],
)
def test_samples_follow_their_condition(tmp_path, name, settings):
    """A linear probe of real images finds the requested class far more often than in unconditional samples."""
    spec = importlib.util.spec_from_file_location("condition", REPOSITORY / "benchmarks" / "studies" / "condition.py")
    condition = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(condition)
    config = tiny_config(name, **settings, train__batch_size=32, train__warmup=100, checkpoint__every=2000)
    train(config, tmp_path / "run", quiet=True)
    found = condition.measure(tmp_path / "run", per_class=19, guidance=3.0, steps=20)
    asked, chance = found["samples, guidance 3"], found["unconditional samples"]
    assert asked["interval"][0] > chance["interval"][1], found
    assert chance["interval"][0] < 1.3 / found["classes"], (
        found
    )  # the probe is not fooled by samples that were not asked


# ------------------------------------------------------------------------------------- clipped predictions


def test_the_setting_decides_about_clipping_and_a_request_overrides_it():
    on, off = (tiny_config("digits-uvit-class", sample__clip_denoised=value) for value in (True, False))
    pixels = override(off, {"sample.clip_denoised": None})
    assert [Request().clips(config) for config in (on, off, pixels)] == [True, False, True]
    assert Request(clip_denoised=False).clips(on) is False
    latents = override(pixels, {"data.vae": "vae"})
    assert Request().clips(latents) is False
    with pytest.raises(InvalidValueError, match="latents"):
        Request(clip_denoised=True).clips(latents)
    with pytest.raises(InvalidValueError, match=r"sample\.clip_denoised"):
        override(latents, {"sample.clip_denoised": True})


def test_clipping_changes_samples_and_is_on_the_card(by_class, tmp_path):
    run = load_run(by_class)
    free = Request(n=72, steps=8, sampler="ddim", clip_denoised=False, batch_size=72)
    check = RangeCheck()
    images = np.concatenate(list(run.generate(free, check=check)))
    assert check.n == 72
    clipped = replace(free, clip_denoised=True)
    assert not np.array_equal(images, np.concatenate(list(run.generate(clipped))))
    for request in (free, clipped):
        generation = run.evaluate(request, "digits:train:80", "pixels").card.generation
        assert generation.clip_denoised is request.clip_denoised
        assert generation.far_share == (0.0 if request.clip_denoised else check.share)
    assert run.pipeline().config.clip_denoised == Request().clips(run.config)


def test_a_run_from_before_the_setting_samples_without_clipping(by_class, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(by_class, folder)
    record = json.loads((folder / "config.json").read_text())
    del record["config"]["sample"]["clip_denoised"]
    (folder / "config.json").write_text(json.dumps(record))
    assert load_run(folder).config.sample.clip_denoised is False
