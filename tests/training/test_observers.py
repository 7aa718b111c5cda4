"""What observes a run: checked before the first step, and in an order that several processes can follow."""

import json
from types import SimpleNamespace

import pytest

from scalelong.errors import UnknownNameError
from scalelong.runs.run import Run
from scalelong.training import observers, trackers
from scalelong.training.loop import train
from scalelong.training.observers import Observers
from tiny_runs import tiny_config


@pytest.mark.parametrize(
    "setting", [{"sample__n": 4}, {"evaluate__every": 4, "evaluate__extractor": "pixels"}], ids=str
)
def test_a_wrong_sampler_is_refused_before_the_first_step(tmp_path, setting):
    with pytest.raises(UnknownNameError, match="dpm-solvr"):
        train(tiny_config(sample__sampler="dpm-solvr", **setting), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_all_processes_do_together_comes_before_what_the_main_process_does_alone(tmp_path, monkeypatch):
    """The others wait ten minutes for it in NCCL, and a day where they exchange signals."""
    order = []

    class Probe:
        def __init__(self, *args):
            pass

        def check(self, *args):
            pass

        def measure(self, *args, **kwargs):
            order.append("probe")
            return SimpleNamespace(best=SimpleNamespace(accuracy=0.5, t=0.1, block="mid_block"))

    monkeypatch.setattr(observers, "ProbedSplits", Probe)
    monkeypatch.setattr(Observers, "_shares", lambda self, net, n: order.append("grid") or [([], None, "no samples")])
    monkeypatch.setattr(
        "scalelong.training.trainer.Trainer.validation_loss", lambda self, *args: order.append("validation") or 1.0
    )

    def metrics(net, step):
        order.append("metrics")
        return {}

    config = tiny_config(train__steps=1, sample__n=1, probe__every=1, validate__every=1)
    train(config, tmp_path / "run", metrics=metrics, quiet=True)
    assert order == ["validation", "validation", "grid", "metrics", "probe"]


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_chooses_the_id_of_a_wandb_run(tmp_path, monkeypatch, main):
    started = []
    accelerator = SimpleNamespace(
        is_main_process=main,
        project_configuration=SimpleNamespace(set_directories=lambda folder: None),
        logging_dir=str(tmp_path),
        init_trackers=lambda *args, init_kwargs, **kwargs: started.append(init_kwargs["wandb"]["id"]),
    )
    monkeypatch.setattr(trackers, "require", lambda *args, **kwargs: None)
    monkeypatch.setattr("accelerate.tracking.filter_trackers", lambda *args: [])
    trackers.start_tracker(SimpleNamespace(accelerator=accelerator, config=tiny_config()), Run(tmp_path), "wandb")
    path = tmp_path / trackers.FILE
    assert path.exists() == main
    assert started == ([json.loads(path.read_text())["id"]] if main else [])
