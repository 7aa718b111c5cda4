"""`scalelong sample`: where it writes, and that two sets of samples never mix."""

import json

import pytest

from scalelong.cli import main
from scalelong.training import override, preset, train
from tiny_runs import tiny_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "run"
    train(override(preset("digits-uvit-class"), tiny_settings(train__steps=1)), folder, quiet=True)
    return folder


@pytest.fixture
def sample(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*options):
        with pytest.raises(SystemExit) as left:
            main(["sample", str(run), "--steps=2", *options])
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return call


def files(folder):
    return sorted(path.name for path in folder.glob("*.png"))


@pytest.mark.parametrize("name", ["grid.jpg", "grid.gif", "out.npz", "GRID.JPEG"])
def test_an_unsupported_ending_is_refused_before_sampling(name, sample, tmp_path, monkeypatch):
    monkeypatch.setattr("scalelong.runs.run.load_run", lambda folder: pytest.fail("loaded the run"))
    code, out, err = sample("--n=2", "--out", name)
    assert (code, out) == (1, "")
    assert name in err
    assert ".png" in err
    assert not list(tmp_path.iterdir())


def test_a_folder_is_recognised_by_its_form(sample, tmp_path):
    for name, folder in (("a", "a"), ("b.jpg/", "b.jpg"), ("cs-0.7", "cs-0.7")):
        assert sample("--n=2", "--out", name)[0] == 0
        assert files(tmp_path / folder) == ["000000.png", "000001.png"]


def test_samples_of_other_settings_do_not_mix(sample, tmp_path):
    assert sample("--n=4", "--out=s/")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    for options in (("--n=2",), ("--n=4", "--seed=1"), ("--n=4", "--first=4", "--seed=1"), ("--n=2", "--sampler=ddim")):
        code, _, err = sample("--out=s/", *options)
        assert code == 1
        assert "--overwrite" in err
        assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before


def test_more_of_the_same_settings_are_added(sample, tmp_path):
    assert sample("--n=2", "--out=s/")[0] == 0
    assert sample("--n=2", "--first=2", "--out=s/")[0] == 0
    assert files(tmp_path / "s") == [f"{k:06d}.png" for k in range(4)]


def test_overwrite_leaves_only_the_new_ones(sample, tmp_path):
    assert sample("--n=4", "--out=s/")[0] == 0
    assert sample("--n=2", "--seed=1", "--out=s/", "--overwrite")[0] == 0
    assert files(tmp_path / "s") == ["000000.png", "000001.png"]
    assert json.loads((tmp_path / "s" / "samples.json").read_text())["seed"] == 1


def test_images_that_are_not_samples_are_never_removed(sample, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"mine")
    code, _, err = sample("--n=2", "--out=photos", "--overwrite")
    assert code == 1
    assert "me.png" in err
    assert files(tmp_path / "photos") == ["me.png"]


def test_it_prints_sampler_steps_and_seconds(sample, run):
    code, out, _ = sample("--n=2", "--sampler=ddim")
    assert code == 0
    assert "2 images, ddim, 2 steps, " in out
    assert " s" in out
    assert list((run / "samples").glob("*ddim-2-seed0.png"))
