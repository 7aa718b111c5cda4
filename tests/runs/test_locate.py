"""The network that comes with the package, and where a run is looked for."""

import numpy as np
import pytest

import scalelong
from scalelong.cli import main
from scalelong.errors import RunError
from scalelong.runs import Request
from scalelong.runs.locate import SHIPPED, locate, shipped_networks


def test_the_shipped_network_is_small_and_opens_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    assert shipped_networks() == ("digits",)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 3e6
    run = scalelong.load_run("digits")
    assert run.step == run.config.train.steps
    assert tmp_path in run.folder.parents  # commands write beside a copy, not into the package


def test_its_samples_are_the_digits_that_were_asked_for(tmp_path, monkeypatch):
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    data = load_digits()
    judge = SVC(gamma=0.001, C=10).fit(data.data, data.target)
    samples = np.concatenate(
        list(scalelong.load_run("digits").generate(Request(n=50, sampler="dpm-solver++", steps=10)))
    )
    labels = np.arange(50) % 10
    assert (judge.predict(samples.reshape(50, 64) / 255 * 16) == labels).mean() > 0.9


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert locate("digits") == tmp_path.relative_to(tmp_path) / "digits"
    with pytest.raises(RunError, match="digits is not a run folder"):
        scalelong.load_run("digits")


def test_an_unknown_name_suggests_the_shipped_one():
    with pytest.raises(RunError, match="did you mean 'digits'"):
        scalelong.load_run("digts")


def test_commands_take_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stopped:
        main(["sample", "digits", "--n", "4", "--steps", "2", "--out", str(tmp_path / "grid.png")])
    assert stopped.value.code in (0, None)
    assert (tmp_path / "grid.png").is_file()


def test_report_takes_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        main(["report", "digits", "--out", str(tmp_path / "report.html")])
    assert stopped.value.code in (0, None)
    assert "digits" in (tmp_path / "report.html").read_text(encoding="utf-8")
