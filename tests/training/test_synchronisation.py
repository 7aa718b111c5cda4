"""Between two logged steps nothing waits for the device, and a step that is not finite is still found."""

import math
import time

import pytest
import torch

from scalelong.errors import NonFiniteError
from scalelong.runs.config import TrainConfig
from scalelong.training.examples import Examples
from scalelong.training.gpu_check import Waits
from scalelong.training.loop import train
from scalelong.training.trainer import Trainer
from scalelong.training.update import Ema, Update
from tiny_runs import losses, read_lines, tiny_config


def waits_of(trainer, steps):
    trainer.step()  # the optimizer's state and the first batch
    counts = []
    for _ in range(steps):
        with Waits() as waits:
            trainer.step()
        counts.append(len(waits.found))
    return counts


def make_trainer(name="digits-uvit", **settings):
    config = tiny_config(name, **{"train__log_every": 5, "train__steps": 20, **settings})
    return Trainer(config, Examples(config, "train"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "digits-class"},
        {"train__accumulate": 2},
        {"train__clip": "none"},
        {"train__precision": "bf16"},
        {"train__nonfinite": "skip", "ema__warmup": True},
        {"scaling": "ls"},
    ],
    ids=str,
)
def test_no_step_between_two_logs_waits_for_the_device(settings):
    counts = waits_of(make_trainer(**settings), steps=9)  # steps 2 … 10
    assert counts[:3] == [0, 0, 0]  # 2, 3, 4
    assert counts[3] > 0  # 5 is logged
    assert counts[4:8] == [0, 0, 0, 0]


def test_an_optimizer_that_cannot_skip_by_itself_is_asked_about_every_step():
    trainer = make_trainer()
    trainer.update.fused = False
    assert all(waits_of(trainer, steps=3))


def test_a_bad_step_between_two_logs_stops_the_run_before_anything_is_kept(tmp_path, monkeypatch):
    batch = Examples.batch

    def spoilt(self, step, first, count):
        made = batch(self, step, first, count)
        if step == 3:
            made.x_0[0] = math.nan
        return made

    monkeypatch.setattr(Examples, "batch", spoilt)
    trainer = make_trainer()
    for _ in range(2):
        trainer.step()
    before = {name: value.clone() for name, value in trainer.net.state_dict().items()}
    trainer.step()
    trainer.step()
    assert all(torch.equal(before[name], value) for name, value in trainer.net.state_dict().items())
    with pytest.raises(NonFiniteError, match=r"not finite at step 3 \(loss nan\); .*timesteps in the batch"):
        trainer.step()
    with pytest.raises(NonFiniteError, match="not finite at step 3"):
        trainer.state()  # a checkpoint between two logs

    config = tiny_config(train__log_every=10, train__steps=20, checkpoint__every=2)
    with pytest.raises(NonFiniteError, match="not finite at step 3"):
        train(config, tmp_path / "run", quiet=True)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_log_every_does_not_change_a_run_that_skips_steps(tmp_path, monkeypatch):
    norm = Trainer._clipped_norm
    monkeypatch.setattr(
        Trainer, "_clipped_norm", lambda self: norm(self) * (math.inf if self.progress.step + 1 in (2, 3) else 1)
    )
    for every in (1, 6):
        config = tiny_config(train__log_every=every, train__nonfinite="skip", train__warmup=5, ema__warmup=True)
        train(config, tmp_path / str(every), quiet=True)
    often, rarely = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("1", "6"))
    assert [entry["step"] for entry in often if entry.get("skipped")] == [2, 3]
    assert [entry["lr"] for entry in often] == pytest.approx([0.0002, 0.0004, 0.0004, 0.0004, 0.0006, 0.0008])
    assert {k: v for k, v in rarely[-1].items() if k != "seconds"} == {
        k: v for k, v in often[-1].items() if k != "seconds"
    }
    models = [tmp_path / name / "model" / "diffusion_pytorch_model.safetensors" for name in ("1", "6")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_an_overflow_of_fp16_advances_neither_schedule_nor_average():
    """torch's own gradient scaler, on the CPU: fused AdamW skips in its kernel and does not tell accelerate."""
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ema = Ema(net, 0.5)
    update = Update(TrainConfig(warmup=4, steps=8, lr=1.0), optimizer, ema, scaler, torch.device("cpu"))
    rates, scales = [], []
    for number in range(1, 5):
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        if number == 2:
            net.weight.grad[0, 0] = math.inf
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        before = [p.clone() for p in (*net.parameters(), *ema.net.parameters())]
        lr, skipped = update.apply(number, loss.detach(), norm)
        after = [*net.parameters(), *ema.net.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (number == 2)
        rates.append(float(lr))
        scales.append(scaler.get_scale())
        assert bool(skipped) == (number == 2)
    assert rates == [0.25, 0.5, 0.5, 0.75]
    assert scales == [4.0, 2.0, 2.0, 2.0]
    assert update.count() == 3
    assert update.first_bad() is None


def test_gradients_that_stay_non_finite_stop_an_fp16_run_once_its_scale_is_below_one():
    """A lower scale cures an overflow of the scaled gradient; one at a scale below 1 is the gradient's own."""
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    update = Update(TrainConfig(steps=8), optimizer, Ema(net, 0.5), scaler, torch.device("cpu"))
    with Waits() as waits:
        for number in range(1, 7):  # at scales 4, 2, 1, 0.5, …
            optimizer.zero_grad()
            loss = net(torch.ones(2, 4)).square().mean()
            scaler.scale(loss).backward()
            net.weight.grad.fill_(math.nan)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
            _, skipped = update.apply(number, loss.detach(), norm)
    before, waits.found = list(waits.found), []
    assert update.first_bad() == 4
    assert bool(skipped)
    assert not before


def test_a_batch_is_prepared_while_the_step_before_it_runs(finished):
    """The thread starts on batch k + 1 when step k takes its own, and the losses do not depend on it."""
    from scalelong.training.ahead import Ahead

    made, ahead = [], None

    def make(step):
        made.append(step)
        return step

    ahead = Ahead(make)
    assert ahead(1) == 1
    until = time.monotonic() + 10
    while made != [1, 2] and time.monotonic() < until:
        time.sleep(0.001)
    assert made == [1, 2]
    assert ahead(2, more=False) == 2
    assert ahead(7, more=False) == 7  # any other step is made on the spot
    assert made == [1, 2, 7]
    assert len(losses(finished)) == 6


def test_an_error_while_preparing_a_batch_is_raised_at_its_step():
    from scalelong.training.ahead import Ahead

    ahead = Ahead(lambda step: 1 // (step - 2))
    ahead(1)
    with pytest.raises(ZeroDivisionError):
        ahead(2)
