"""`scalelong freeze` writes a run with constants that loads, samples and describes like any other."""

import json

import pytest
import torch

import scalelong
from scalelong.cli import main
from scalelong.errors import RunError
from scalelong.experiments.freezing import freeze
from scalelong.runs.generate import Request
from scalelong.runs.run import Run, load_run
from scalelong.scaling import ExplicitScaling, LearnableScaling
from scalelong.training import train
from tiny_runs import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("freeze") / "ls"
    train(tiny_config("digits-uvit", LearnableScaling(), train__steps=2), folder, quiet=True)
    return folder


def test_the_frozen_run_loads_like_any_other(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["freeze", str(run), "--out", str(tmp_path / "frozen"), "-n", "32", "--json"])
    assert stopped.value.code in (0, None)
    printed = json.loads(capsys.readouterr().out)
    frozen = load_run(tmp_path / "frozen")
    spec = frozen.config.scaling
    assert isinstance(spec, ExplicitScaling)
    assert list(spec.values) == [skip["coefficient"] for skip in printed["skips"]]
    assert [row.coefficient for row in scalelong.describe(frozen.net).rows] == pytest.approx(spec.values)
    assert (frozen.step, frozen.record["distilled_from"]) == (2, "ls")
    assert next(iter(frozen.generate(Request(n=2, steps=2)))).shape == (2, 8, 8, 1)
    assert printed["loss_change"]["low"] <= printed["loss_change"]["mean"] <= printed["loss_change"]["high"]


def test_its_network_is_the_one_that_was_measured(run, tmp_path):
    result = freeze(run, tmp_path / "frozen", n=16)
    net = load_run(run).net
    scalelong.apply(net.train(), result.distillation.scaling, replace=True)
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([100.0, 700.0])
    torch.testing.assert_close(load_run(tmp_path / "frozen").net(x, t), net.eval()(x, t))


def test_other_runs_and_existing_folders_are_refused(run, tmp_path):
    with pytest.raises(RunError, match="is a run already"):
        freeze(run, run)
    train(tiny_config("digits-uvit", train__steps=1), tmp_path / "none", quiet=True)
    with pytest.raises(RunError, match="needs a run of scaling ls"):
        freeze(tmp_path / "none")
    assert not Run(tmp_path / "none-frozen").exists
