"""`Run`: strict about what a run is, tolerant about what was measured, and the one reader of every file."""

import json
import shutil

import numpy as np
import pytest

from scalelong import ConstantScaling, load_run
from scalelong.errors import RunError
from scalelong.runs import Request, Run, find_runs
from scalelong.training.loop import train
from tiny_runs import tiny_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(tiny_config(scaling=ConstantScaling(0.5), monitor__every=2), folder, quiet=True)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_trained_run_has_everything(trained):
    run = load_run(trained)
    # what "auto" became on this machine is stored
    assert run.config == tiny_config(scaling=ConstantScaling(0.5), monitor__every=2, train__precision="fp32")
    assert (run.name, run.step, run.logged_step) == ("trained", 6, 6)
    assert run.net.config.scaling == {"kind": "cs", "kappa": 0.5, "reverse": False}
    assert not run.net.training
    assert (run.facts.shapes.channels, run.facts.shapes.size, run.facts.null_y) == (1, 8, None)
    assert run.metrics["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.column("val_loss").last == run.metrics["val_loss"].values[-1]
    assert len(run.column("never logged")) == 0
    assert run.stability.steps.tolist() == [2, 4, 6]
    assert run.settings["train.lr"] == 1e-3
    assert (run.evaluations, run.robustness, run.failure) == ({}, None, None)
    assert run.resources["cpu_seconds"] > 0
    assert np.concatenate(list(run.generate(Request(n=3, steps=2)))).shape == (3, 8, 8, 1)
    assert run.pipeline()(batch_size=2, num_inference_steps=2, output_type="np").images.shape == (2, 8, 8, 1)


def test_a_folder_that_is_no_run_is_refused_by_load_run_and_empty_for_readers(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        load_run(tmp_path / "nowhere")
    run = Run(tmp_path)
    assert not run.exists
    assert (run.record, run.settings, run.metrics, run.logged_step, run.stability) == ({}, {}, {}, 0, None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"config": 1}', b'{"config": {}, "data": 3}', b"\xff"])
def test_a_damaged_config_raises_for_the_config_and_not_for_the_logs(copy, content):
    (copy / "config.json").write_bytes(content)
    run = Run(copy)
    with pytest.raises(RunError, match=r"config\.json"):
        _ = run.config
    assert isinstance(run.settings, dict)
    assert run.logged_step == 6


def test_a_run_without_a_network_says_so(copy):
    shutil.rmtree(copy / "model")
    assert Run(copy).config.train.steps == 6
    with pytest.raises(RunError, match="model/"):
        load_run(copy)
    with pytest.raises(RunError, match=r"step\.json"):
        _ = Run(copy).step


def test_stored_evaluations_are_read_by_their_origin(copy):
    (copy / "evaluations").mkdir()
    for name, value in {
        "evaluation.json": 1.0, "distance.json": 2.0,
        "evaluations/step-00000002.json": 3.0, "evaluations/step-00000004.json": 4.0,
    }.items():  # fmt: skip
        (copy / name).write_text(json.dumps({"card": {}, "value": value}))
    stored = Run(copy).evaluations
    assert {origin: values["value"] for origin, values in stored.items()} == {"evaluate": 1, "compare": 2, "train": 4}
    (copy / "evaluation.json").write_text("{}")
    (copy / "distance.json").write_text("{")
    assert list(Run(copy).evaluations) == ["train"]


def test_resources_are_numbers(copy):
    (copy / "resources.json").write_text('{"cpu_seconds": 1.5, "threads": 2, "name": "x", "flag": true}')
    assert Run(copy).resources == {"cpu_seconds": 1.5, "threads": 2}


def test_the_folder_of_a_comparison_stands_for_its_runs(trained, tmp_path):
    for name in ("cs-seed0", "none-seed0", "none-seed1"):
        shutil.copytree(trained, tmp_path / name)
    runs = [
        {"variant": "cs", "seed": 0, "folder": "elsewhere/cs-seed0"},
        {"variant": "none", "seed": 1, "folder": "none-seed1"},
        {"variant": "none", "seed": 0, "folder": "none-seed0"},
        {"variant": "none", "seed": 2, "folder": "not-trained"},
    ]
    rows = [{"variant": "none"}, {"variant": "cs"}]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": runs, "rows": rows}))
    assert [run.name for run in find_runs([tmp_path])] == ["none-seed0", "none-seed1", "cs-seed0"]
    assert [run.name for run in find_runs([tmp_path / "cs-seed0", tmp_path])][0] == "cs-seed0"
    assert len(find_runs([tmp_path, tmp_path / "cs-seed0"])) == 3  # each once


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(RunError, match="neither a run"):
        find_runs([tmp_path])
    with pytest.raises(RunError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="no runs"):
        find_runs([])


def test_a_locked_run_refuses_a_second_owner_and_is_free_afterwards(copy):
    import os

    with Run(copy).locked():
        with pytest.raises(RunError, match=f"in use.*process {os.getpid()}"), Run(copy).locked():
            pass
    with Run(copy).locked():
        pass


def test_a_u_vit_stores_its_scaling_once(trained):
    assert not (trained / "model" / "scaling.json").exists()
    stored = json.loads((trained / "model" / "config.json").read_text())
    assert stored["scaling"]["kappa"] == 0.5
