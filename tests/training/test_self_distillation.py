"""Contrastive self-distillation: the loss, the views, and training that stays a function of (config, step)."""

import math

import pytest
import torch

from scalelong.errors import InvalidValueError, UnknownNameError
from scalelong.training import train
from scalelong.training.distillation import info_nce
from scalelong.training.examples import Examples
from scalelong.training.trainer import Trainer
from tiny_runs import losses, read_lines, tiny_config

ON = {"distillation__weight": 0.1, "distillation__stride": 2, "distillation__width": 8}


def trainer(name="digits-uvit", **settings):
    config = tiny_config(name, train__precision="fp32", **settings)
    return Trainer(config, Examples(config, "train"))


def test_the_loss_of_orthogonal_features_is_the_closed_form():
    n, tau = 6, 0.5
    expected = math.log(1 + (n - 1) * math.exp(-1 / tau))
    assert info_nce(3 * torch.eye(n), 7 * torch.eye(n), 0, tau).item() == pytest.approx(expected, rel=1e-6)


def test_shares_of_two_processes_average_to_the_loss_of_one():
    q, k = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    halves = [info_nce(q[:4], k, 0, 0.2), info_nce(q[4:], k, 4, 0.2)]
    assert sum(halves).item() / 2 == pytest.approx(info_nce(q, k, 0, 0.2).item(), rel=1e-6)


def test_views_are_functions_of_config_and_step_in_the_cleaner_part():
    one, other = (trainer(**ON, distillation__until=0.1) for _ in range(2))
    batch = one.batch(1).part(0, 4)
    views = [
        t.distillation._view(batch, step, 0, which)
        for t, step, which in [(one, 1, 0), (other, 1, 0), (one, 2, 0), (one, 1, 1)]
    ]
    same, again, next_step, second = views
    assert all(torch.equal(getattr(same, name), getattr(again, name)) for name in ("x_0", "t", "eps"))
    for different in (next_step, second):
        assert not torch.equal(same.eps, different.eps)
        assert not torch.equal(same.t, different.t)
    assert all(float(view.t.max()) <= 0.1 for view in views)
    later = one.distillation._view(batch.part(2, 2), 1, 2, 0)  # positions do not depend on the share of a process
    assert torch.equal(later.eps, same.eps[2:])
    assert torch.equal(later.x_0, same.x_0[2:])


def test_the_gradient_is_weighted_and_stops_at_the_block_and_at_the_teacher():
    gradients = []
    for weight in (0.1, 0.2):
        t = trainer(**{**ON, "distillation__weight": weight}, distillation__block="in_blocks.1")
        loss = t.distillation.add_gradient(t.batch(1), 1)
        gradients.append({name: p.grad for name, p in t.net.named_parameters()})
        assert loss > 0
        assert all(p.grad is None for p in t.ema.net.parameters())
    small, large = gradients
    assert torch.allclose(2 * small["in_blocks.0.mlp.fc1.weight"], large["in_blocks.0.mlp.fc1.weight"], rtol=1e-4)
    assert small["in_blocks.0.mlp.fc1.weight"].norm() > 0
    assert small["mid_block.mlp.fc1.weight"] is None  # later than the block


def test_training_logs_it_resumes_exactly_and_leaves_the_denoising_loss_of_the_first_step(tmp_path):
    whole = train(tiny_config(**ON), tmp_path / "whole", quiet=True).run
    train(tiny_config(**ON, train__steps=4), tmp_path / "parts", quiet=True)
    parts = train(tiny_config(**ON), tmp_path / "parts", quiet=True).run
    assert losses(parts.folder) == losses(whole.folder)
    logged = [[entry["distillation_loss"] for entry in read_lines(run.metrics_path)] for run in (parts, whole)]
    assert logged[0] == logged[1]
    assert len(logged[0]) == 6
    plain = train(tiny_config(), tmp_path / "plain", quiet=True).run
    first, changed = losses(plain.folder), losses(whole.folder)
    assert first[0][:2] == changed[0][:2]
    assert first[-1] != changed[-1]
    assert set(whole.net.state_dict()) == set(plain.net.state_dict())  # projectors are not part of model/


def test_descending_its_gradient_lowers_the_loss_of_the_same_views():
    t = trainer(**{**ON, "distillation__weight": 1.0})
    before = t.distillation.add_gradient(t.batch(1), 1).item()
    with torch.no_grad():
        for parameter in (*t.net.parameters(), *t.distillation.projector.parameters()):
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    t.net.zero_grad()
    assert t.distillation.add_gradient(t.batch(1), 1).item() < before - 1e-5


def test_it_follows_self_conditioning_in_a_u_net_with_classes():
    t = trainer("digits-class", **ON, self_conditioning__block="down_blocks.1")
    assert t.distillation.block == "down_blocks.1"
    t.step()
    assert math.isfinite(t.distillation_loss.item())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"distillation__stride": 3}, InvalidValueError),
        ({"distillation__block": "middle"}, UnknownNameError),
        ({"train__compile": "whole"}, InvalidValueError),
        ({"distillation__temperature": 0}, InvalidValueError),
        ({"distillation__until": 2}, InvalidValueError),
        ({"distillation__weight": -1}, InvalidValueError),
    ],
)
def test_settings_that_cannot_work_are_refused_before_training(settings, error):
    with pytest.raises(error):
        trainer(**{**ON, **settings})
