"""Learning-rate schedules against those of torch and transformers, and their resume."""

import json
from dataclasses import replace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from scalelong.errors import RunError, ScaleLongError
from scalelong.runs.config import Config, TrainConfig, override
from scalelong.runs.run import Run
from scalelong.training.loop import train
from scalelong.training.schedule import DECAYS, lr_factor, same_past
from tiny_runs import losses, tiny_config


def rates(scheduler, optimizer, n):
    values = []
    for _ in range(n):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def one_parameter():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_cosine_and_linear_are_torchs(ratio):
    optimizer = one_parameter()
    cosine = rates(CosineAnnealingLR(optimizer, 40, eta_min=ratio), optimizer, 40)
    settings = TrainConfig(steps=40, warmup=0, schedule="cosine", min_lr_ratio=ratio)
    assert [lr_factor(settings, k) for k in range(40)] == pytest.approx(cosine, abs=1e-12)
    optimizer = one_parameter()
    linear = rates(LinearLR(optimizer, 1.0, ratio, 40), optimizer, 40)
    settings = replace(settings, schedule="linear")
    assert [lr_factor(settings, k) for k in range(40)] == pytest.approx(linear, abs=1e-12)


def test_warmup_stable_decay_is_transformers():
    from transformers import get_wsd_schedule

    optimizer = one_parameter()
    theirs = get_wsd_schedule(
        optimizer, num_warmup_steps=5, num_stable_steps=65, num_decay_steps=30, decay_type="linear", min_lr_ratio=0.1
    )
    expected = rates(theirs, optimizer, 100)
    settings = TrainConfig(steps=100, warmup=5, schedule="warmup-stable-decay", decay_share=0.3, min_lr_ratio=0.1)
    ours = [lr_factor(settings, k) for k in range(100)]
    assert ours[5:] == pytest.approx(expected[5:], abs=1e-12)
    assert ours[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]  # theirs starts at 0, ours at the first share of the warm-up


def test_constant_is_exactly_one_after_the_warmup_and_is_the_default():
    assert [lr_factor(TrainConfig(warmup=2), k) for k in (0, 1, 2, 10**6)] == [0.5, 1.0, 1.0, 1.0]
    assert TrainConfig().schedule == "constant"


@pytest.mark.parametrize("schedule", DECAYS)
def test_the_logged_rates_are_the_schedules_exactly_and_a_resumed_run_has_the_same(tmp_path, schedule, monkeypatch):
    decay = {"train__min_lr_ratio": 0.05} if schedule != "constant" else {}
    decay |= {"train__decay_share": 0.5} if schedule == "warmup-stable-decay" else {}
    config = tiny_config(train__schedule=schedule, **decay)
    train(config, tmp_path / "whole", quiet=True)
    expected = [config.train.lr * lr_factor(config.train, k) for k in range(6)]
    assert Run(tmp_path / "whole").metrics["lr"].values.tolist() == expected
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    train(config, tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert Run(tmp_path / "parts").metrics["lr"].values.tolist() == expected


def stop_after(monkeypatch, step):
    from scalelong.training.trainer import Trainer

    original = Trainer.step

    def stopped(self):
        if self.progress.step == step:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(Trainer, "step", stopped)


def test_a_run_is_extended_only_if_its_past_learning_rates_stay_the_same(tmp_path):
    settings = TrainConfig(steps=100, warmup=10)
    for schedule in ("cosine", "linear"):
        decaying = replace(settings, schedule=schedule)
        assert same_past(decaying, replace(decaying, steps=200), updates=10)  # only the warm-up is over
        assert not same_past(decaying, replace(decaying, steps=200), updates=12)
    stable = replace(settings, schedule="warmup-stable-decay", decay_share=0.2)
    assert same_past(stable, replace(stable, steps=200), updates=80)
    assert not same_past(stable, replace(stable, steps=200), updates=82)
    assert same_past(settings, replace(settings, steps=200), updates=100)

    folder = tmp_path / "run"
    train(tiny_config(train__schedule="cosine", train__steps=4), folder, quiet=True)
    with pytest.raises(RunError, match=r"train\.steps=4.*train\.steps=6.*--steps 4"):
        train(tiny_config(train__schedule="cosine", train__steps=6), folder, quiet=True)
    assert train(tiny_config(train__schedule="cosine", train__steps=4), folder, quiet=True).finished


def test_a_config_from_before_schedules_opens_with_a_constant_one():
    values = json.loads(Config().to_json())
    for name in ("schedule", "min_lr_ratio", "decay_share"):
        del values["train"][name]
    assert Config.from_dict(values).train.schedule == "constant"


@pytest.mark.parametrize(("key", "value"), [("schedule", "cosin"), ("min_lr_ratio", "1.5"), ("decay_share", "-0.1")])
def test_a_wrong_schedule_is_refused(key, value):
    with pytest.raises(ScaleLongError, match=value):
        override(Config(), {f"train.{key}": value})
