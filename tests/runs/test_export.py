"""An exported network computes what the network computes, for any batch size, with and without this package."""

import json

import numpy as np
import pytest
import torch

from scalelong.cli import main
from scalelong.runs.export import export_run, inputs
from scalelong.runs.run import load_run
from scalelong.training import train
from tiny_runs import tiny_config

RUNS = {
    "unet": ("digits", "cs:0.5", {"model__channels": (8, 8), "train__steps": 1}),
    "uvit": ("digits-uvit-class", "ls", {"train__steps": 1}),
}


@pytest.fixture(scope="module", params=["unet", pytest.param("uvit", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    from scalelong import parse_scaling

    name, scaling, settings = RUNS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    train(tiny_config(name, parse_scaling(scaling), **settings), folder, quiet=True)
    return load_run(folder)


def test_onnx_runs_without_torch_and_equals_the_network(run, tmp_path):
    import onnxruntime

    made = export_run(run, "onnx", tmp_path / "model.onnx")
    assert made.difference < 1e-4
    case = inputs(run.facts.shapes, 70)
    output = onnxruntime.InferenceSession(str(made.path)).run(None, {k: v.numpy() for k, v in case.items()})[0]
    names = {"x": "sample", "t": "timestep"} if "sample" in run.net.forward.__code__.co_varnames else {}
    with torch.no_grad():
        expected = run.net(**{names.get(k, k): v for k, v in case.items()})
    assert np.abs(output - expected.numpy()).max() < 1e-4


@pytest.mark.slow  # the command below does the same with the shipped network
def test_a_torch_export_program_equals_the_network(run, tmp_path):
    made = export_run(run, "torch-export", tmp_path / "model.pt2")
    assert made.difference < 1e-4
    case = inputs(run.facts.shapes, 5)
    program = torch.export.load(made.path).module()
    assert program(**case).shape == case["x"].shape


def test_the_command_exports_the_shipped_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stopped:
        main(["export", "digits", "--torch-export", "--out", str(tmp_path / "out"), "--json"])
    assert stopped.value.code in (0, None)
    result = json.loads(capsys.readouterr().out)
    assert result["inputs"] == ["x", "t", "y"]
    assert result["difference"] < 1e-4
    assert (tmp_path / "out" / "model.pt2").is_file()


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    import importlib

    from scalelong import errors

    real = importlib.import_module
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))

    def hide(name, *rest):
        if name.startswith("onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(errors.importlib, "import_module", hide)
    for line, said in (
        (["--onnx"], "pip install 'scalelong[export]'"),
        ([], "expected --onnx, --torch-export or both"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["export", "digits", *line])
        assert stopped.value.code == 1
        assert said in capsys.readouterr().err


def test_a_network_that_computes_something_else_is_not_written(run, tmp_path, monkeypatch):
    from scalelong.runs import export

    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(export.RunError, match="not written"):
        export_run(run, "torch-export", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
