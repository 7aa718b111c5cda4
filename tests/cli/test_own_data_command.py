"""A user's own folder from a fresh process: train, resume, sample, evaluate; messages in the words of the command."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from scalelong.cli import main

TINY = ["--steps=2", "--batch-size=4", "--set=model.channels=8,8,8", "--set=sample.n=4", "--set=sample.steps=2",
        "--set=monitor.every=0"]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(folder, count, size=(9, 12), mode="RGB", suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    for k in range(count):
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = rng.integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
        Image.frombytes(mode, size, pixels.tobytes()).save(folder / f"{k}.{suffix}")
    return folder


def scalelong(*words, cwd):
    """Run a command in a fresh process."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "scalelong", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8", timeout=300)


def told(capsys, *words):
    """Run a command here; return its exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, words)])
    return left.value.code or 0, *capsys.readouterr()


@pytest.fixture
def photos(tmp_path):
    """Three classes of different formats inside two wrappers."""
    for name, mode, suffix in (("猫 neko", "RGBA", "png"), ("a dog", "CMYK", "jpg"), ("Käse", "L", "webp")):
        write(tmp_path / "wrapper" / "my photos" / name, 20, mode=mode, suffix=suffix)
    return tmp_path / "wrapper"


def test_a_folder_trains_in_a_fresh_process(tmp_path, photos):
    result = scalelong("train", "--data", "wrapper", *TINY, "--out", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "60 images, 9×12, colour, with transparency, 3 classes" in result.stderr.replace(" (median)", "")
    record = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert record["class_names"] == ["Käse", "a dog", "猫 neko"]


@pytest.mark.slow
def test_a_run_on_a_folder_resumes_and_samples_from_anywhere(tmp_path, photos):
    command = ["train", "--data", "wrapper", "--holdout", "0.2", *TINY, "--out", "run"]
    assert scalelong(*command, cwd=tmp_path).returncode == 0
    again = scalelong(*command, "--steps=3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resuming after step 2" in again.stderr
    (tmp_path / "elsewhere").mkdir()
    words = ["sample", "../run", "--class", "猫 neko", "--n", 2, "--out", "grid.png"]
    sampled = scalelong(*words, cwd=tmp_path / "elsewhere")
    assert sampled.returncode == 0, sampled.stderr
    assert (tmp_path / "elsewhere" / "grid.png").is_file()


@pytest.mark.slow
def test_a_grey_run_is_evaluated_with_its_own_grey_samples(tmp_path):
    write(tmp_path / "grey", 80, (8, 8), "L")
    assert scalelong("train", "--data", "grey", *TINY, "--out", "run", cwd=tmp_path).returncode == 0
    assert scalelong("sample", "run", "--n", 70, "--steps", 2, "--out", "made", cwd=tmp_path).returncode == 0
    for words in (["--images", "made", "--reference", "grey"], ["run", "--reference", "made", "--n", 70]):
        result = scalelong("evaluate", *words, "--extractor", "pixels", "--json", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["card"]["image"] == [8, 8, 1]


@pytest.mark.slow
def test_a_comparison_on_a_folder_in_fresh_processes(tmp_path):
    write(tmp_path / "photos", 70)
    words = ["compare", "--data", "photos", "--scalings", "none,cs", "--seeds", 1, "--samples", 70, *TINY]
    words = [word for word in words if not str(word).startswith("--batch")] + ["--set=train.batch_size=4"]
    for _ in range(2):  # the second is finished at once
        result = scalelong(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "compare-photos" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train", "digits", "--data", "photos", "--dry-run"], {"image_size": 8, "channels": 3, "background": None}),
        (
            ["train", "--data", "photos", "--image-size", 16, "--channels", 1, "--background", "#102030", "--holdout",
             0.1, "--skip-bad", "--dry-run"],
            {"image_size": 16, "channels": 1, "background": "#102030", "holdout": 0.1, "skip_bad": True},
        ),
        (["train", "--data", "photos", "--set", "data.image_size=20", "--dry-run"], {"image_size": 20, "holdout": 0.0}),
    ],
)  # fmt: skip
def test_the_options_of_prepare_are_those_of_train(tmp_path, capsys, words, options):
    write(tmp_path / "photos", 12)
    code, out, err = told(capsys, *words)
    assert code == 0, err
    data = json.loads(out)["data"]
    assert {key: data[key] for key in options} == options
    assert data["name"] == str(tmp_path / "photos")


@pytest.mark.parametrize(
    ("words", "message", "wrong"),
    [
        (["data", "prepare", "clear"], "pass --background white", "--set"),
        (["data", "prepare", "photos"], "pass --image-size N", "--set"),
        (["kappa", "--data", "clear", "--skips", 6], "scalelong data prepare with --background white", "--set"),
        (["kappa", "--data", "photos", "--skips", 6], "pass --image-size N", "--set"),
        (["train", "--data", "broken", "--quiet"], "pass --skip-bad", "--set"),
        (["compare", "--data", "broken", "--quiet"], "pass --skip-bad", "--set"),
        (["train", "--data", "photos", "--channels", 2], "--channels must be 1 (grey) or 3 (RGB), got 2", "data."),
        (["train", "--data", "photos", "--holdout", 2], "--holdout must be in [0, 1), got 2.0", "data."),
        (["train", "--data", "photos", "--set", "data.holdout=2"], "data.holdout must be in [0, 1), got 2.0", "--hold"),
        (["train", "digits", "--steps", 0], "--steps must be an integer >= 1", "train.steps"),
        (["train", "digits-class", "--data", "photos", "--quiet"], "pass --set data.classes=false", "; set "),
    ],
)  # fmt: skip
def test_messages_use_the_words_of_the_command(tmp_path, capsys, words, message, wrong):
    write(tmp_path / "photos", 4)
    write(tmp_path / "clear", 4, (8, 8), "RGBA")
    write(tmp_path / "broken", 4, (8, 8))
    (tmp_path / "broken" / "2.png").write_bytes(b"no image")
    code, _, err = told(capsys, *words)
    assert code == 1
    assert message in err
    assert wrong not in err


def test_info_of_a_folder_that_is_not_prepared_says_what_is_in_it(tmp_path, capsys):
    write(tmp_path / "photos" / "cat", 4, mode="L")
    write(tmp_path / "photos" / "dog", 3)
    code, out, _ = told(capsys, "data", "info", "photos")
    assert code == 0
    assert "7 images, 9×12 (median), colour, 2 classes" in out
    assert "classes: cat, dog" in out


def test_presets_print_yaml_that_train_accepts(tmp_path, capsys):
    _, out, _ = told(capsys, "presets", "cifar10-tiny", "--yaml")
    (tmp_path / "my.yaml").write_text(out, encoding="utf-8")
    _, expected, _ = told(capsys, "train", "cifar10-tiny", "--scaling", "cs", "--dry-run")
    _, out, _ = told(capsys, "train", "--config", "my.yaml", "--scaling", "cs", "--dry-run")
    assert json.loads(out) == json.loads(expected)
    assert told(capsys, "presets", "--yaml")[0] == 1
    code, _, err = told(capsys, "train", "--config", "none.yaml")
    assert (code, "none.yaml" in err) == (1, True)
