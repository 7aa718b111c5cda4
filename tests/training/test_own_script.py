"""A loss, an optimizer and metrics of one's own in `train()`, and what a resumed run says about them."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from scalelong.errors import InvalidValueError, RunError
from scalelong.runs.run import Run, load_run
from scalelong.training.loop import train
from tiny_runs import losses, read_lines, tiny_config


def plain(eps_fn, process, batch):
    """The built-in loss, written by hand."""
    x_t = process.add_noise(batch.x_0, batch.eps, batch.t)
    return (batch.eps - eps_fn(x_t, batch.t)).square().flatten(1).mean(1)


def weighted(eps_fn, process, batch, limit=5.0):
    snr = (process.alpha(batch.t) / process.sigma(batch.t)).square().float()
    return plain(eps_fn, process, batch) * snr.clamp(max=limit) / snr


def sgd(net):
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "lr": 0.1}]
    groups += [{"params": [p for p in net.parameters() if p.ndim <= 1], "lr": 0.01}]
    return torch.optim.SGD(groups, momentum=0.9)


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["momentum"] = 0.9 / group["k"]
        return super().step(closure)


def counting(net):
    return Counting(net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("preset", ["digits", "digits-class"])
def test_the_paper_s_loss_written_by_hand_gives_the_same_run(tmp_path, preset):
    train(tiny_config(preset, train__steps=2), tmp_path / "built-in", quiet=True)
    train(tiny_config(preset, train__steps=2), tmp_path / "own", loss=plain, quiet=True)
    assert losses(tmp_path / "own") == losses(tmp_path / "built-in")


@pytest.mark.parametrize("optimizer", [sgd, counting])
def test_a_run_with_own_pieces_resumes_exactly(tmp_path, optimizer):
    pieces = {"loss": partial(weighted, limit=3.0), "optimizer": optimizer}
    train(tiny_config(), tmp_path / "whole", **pieces, quiet=True)
    train(tiny_config(train__steps=3), tmp_path / "parts", **pieces, quiet=True)
    train(tiny_config(), tmp_path / "parts", **pieces, quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = (load_run(tmp_path / name).net.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_schedule_multiplies_the_learning_rates_of_the_groups(tmp_path):
    train(tiny_config(train__steps=2), tmp_path, optimizer=sgd, quiet=True)
    assert Run(tmp_path).metrics["lr"].values.tolist() == pytest.approx([0.05, 0.1])  # of the first group: two warm up


def test_a_resumed_run_needs_the_same_loss_and_optimizer(tmp_path):
    pieces = {"loss": partial(weighted, limit=3.0), "optimizer": sgd}
    train(tiny_config(train__steps=1), tmp_path, **pieces, quiet=True)
    recorded = json.loads((tmp_path / "config.json").read_text())["own"]
    assert "weighted" in recorded["loss"]
    assert "limit=3.0" in recorded["loss"]
    with pytest.raises(RunError, match=r"loss: .*weighted.* → built in"):
        train(tiny_config(), tmp_path, optimizer=sgd, quiet=True)
    with pytest.raises(RunError, match=r"limit=3\.0 → .*limit=4\.0"):
        train(tiny_config(), tmp_path, loss=partial(weighted, limit=4.0), optimizer=sgd, quiet=True)
    with pytest.raises(RunError, match=r"optimizer: "):
        train(tiny_config(), tmp_path, loss=pieces["loss"], quiet=True)


def test_own_metrics_are_logged_at_every_validation_and_change_no_loss(tmp_path, finished):
    seen = []

    def metrics(net, step):
        seen.append((step, net.training, torch.is_grad_enabled()))
        return {"weight": net.pos_embed.norm(), "twice": 2 * step}

    train(tiny_config(validate__every=2), tmp_path, metrics=metrics, quiet=True)
    assert seen == [(2, False, False), (4, False, False), (6, False, False)]
    entries = {entry["step"]: entry for entry in read_lines(Run(tmp_path).metrics_path)}
    assert [entries[step].get("twice") for step in (1, 2, 4, 6)] == [None, 4.0, 8.0, 12.0]
    assert losses(tmp_path) == losses(finished)


@pytest.mark.parametrize(
    "pieces",
    [{"loss": lambda eps_fn, process, batch: torch.zeros(())}, {"metrics": lambda net, step: {"loss": 1.0}},
     {"metrics": lambda net, step: {"words": "many"}}],
)  # fmt: skip
def test_a_wrong_result_of_an_own_function_is_named(tmp_path, pieces):
    with pytest.raises(InvalidValueError, match="custom"):
        train(tiny_config(train__steps=1), tmp_path, **pieces, quiet=True)


# ------------------------------------------------------------------------------------------- trackers


def test_tensorboard_receives_grids_and_the_run_s_name_and_a_resumed_run_continues(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"tracker": "tensorboard", "sample__n": 4, "sample__steps": 2, "sample__every": 2}
    train(tiny_config(train__steps=2, **options), tmp_path / "named", quiet=True)
    train(tiny_config(train__steps=4, **options), tmp_path / "named", quiet=True)
    reader = EventAccumulator(str(tmp_path / "named" / "named"))  # TensorBoard shows the folder's name
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [1, 2, 3, 4]
    (tag,) = reader.Tags()["images"]
    assert [event.step for event in reader.Images(tag)] == [2, 4]
    assert reader.Images(tag)[0].width > 8


def test_one_process_of_accelerate_on_cpus_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # what `accelerate launch --cpu` sets
    train(tiny_config(train__steps=1), tmp_path)
    assert "torchrun" in capsys.readouterr().err


# ------------------------------------------------------------------------------- docs/your-own-script.md


@pytest.mark.parametrize("name", ["loop", "pieces"])
def test_the_scripts_of_the_documentation_run(tmp_path, monkeypatch, name):
    page = (Path(__file__).parents[2] / "docs" / "your-own-script.md").read_text(encoding="utf-8")
    code = page.split(f"<!-- test: {name} -->")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{name}.py", "exec"), {"steps": 10 if name == "loop" else 2, "__name__": "script"})
    if name == "loop":
        assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 23
        assert (tmp_path / "samples.png").is_file()
        assert len(read_lines(tmp_path / "stability.jsonl")) >= 1
    else:
        assert "weight_norm" in read_lines(tmp_path / "runs" / "mine" / "metrics.jsonl")[-1]
