"""Classifier-free guidance (its formula and its network calls) and clipped predictions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelong.diffusion import PROCESSES, clip_denoised, get_process, guided
from scalelong.errors import InvalidValueError


class Counting:
    """An ε̂ that depends on every argument and records the batch size of each call."""

    def __init__(self):
        self.rows = []

    def __call__(self, x, t, y=None, context=None):
        self.rows.append(len(x))
        eps = x.sin() + (t / 999)[:, None]
        if y is not None:
            eps = eps + y[:, None].to(x) * x.cos()
        if context is not None:
            eps = eps * context.mean((1, 2))[:, None]
        return eps


X, T = torch.linspace(-1, 1, 15).reshape(3, 5).double(), torch.tensor([0.1, 0.5, 1.0]).double()
Y, CONTEXT, EMPTY = torch.tensor([2, 0, 1]), torch.linspace(1, 2, 24).reshape(3, 4, 2).double(), torch.ones(4, 2) / 7
PROCESS = get_process("vp")
CONDITIONS = {
    "classes": ({"y": Y}, {"null_y": 3}, {"y": torch.full((3,), 3)}),
    "text": ({"context": CONTEXT}, {"null_context": EMPTY}, {"context": EMPTY.double().expand(3, 4, 2)}),
    "both": (
        {"y": Y, "context": CONTEXT},
        {"null_y": 3, "null_context": EMPTY},
        {"y": torch.full((3,), 3), "context": EMPTY.double().expand(3, 4, 2)},
    ),
}


@pytest.mark.parametrize("kind", CONDITIONS)
@given(guidance=st.floats(-3, 10))
def test_guidance_is_diffusers_and_the_papers_scale_is_guidance_minus_1(kind, guidance):
    conditions, null, without = CONDITIONS[kind]
    net = Counting()
    conditional = net(X, PROCESS.network_time(T), **conditions)
    unconditional = net(X, PROCESS.network_time(T), **without)
    result = guided(net, PROCESS, guidance, **conditions, **null)(X, T)
    torch.testing.assert_close(result, unconditional + guidance * (conditional - unconditional))
    scale = guidance - 1
    torch.testing.assert_close(result, conditional + scale * (conditional - unconditional))


@pytest.mark.parametrize(("guidance", "rows"), [(1.0, [3]), (0.0, [3]), (3.0, [6]), (-1.0, [6])])
def test_guidance_makes_one_call_and_doubles_the_batch_only_when_it_needs_both_halves(guidance, rows):
    net = Counting()
    guided(net, PROCESS, guidance, y=Y, null_y=3)(X, T)
    assert net.rows == rows


def test_guidance_1_needs_no_null_and_no_condition():
    net = Counting()
    assert torch.equal(guided(net, PROCESS)(X, T), net(X, PROCESS.network_time(T)))
    assert torch.equal(guided(net, PROCESS, 1.0, y=Y)(X, T), net(X, PROCESS.network_time(T), y=Y))


def test_guidance_without_a_condition_or_its_null_raises():
    with pytest.raises(InvalidValueError, match="guidance.*2"):
        guided(Counting(), PROCESS, 2.0)
    with pytest.raises(InvalidValueError, match="null_y"):
        guided(Counting(), PROCESS, 2.0, y=Y)
    with pytest.raises(InvalidValueError, match="null_context"):
        guided(Counting(), PROCESS, 0.0, y=Y, context=CONTEXT, null_y=3)


@pytest.mark.parametrize("name", PROCESSES)
def test_clipped_predictions_imply_an_image_in_range_and_keep_values_inside(name):
    process = get_process(name)
    x_0 = torch.linspace(-2, 2, 21, dtype=torch.float64).expand(4, 21)
    eps = torch.randn(4, 21, dtype=torch.float64)
    t = process.t_max * torch.tensor([0.01, 0.2, 0.7, 1.0], dtype=torch.float64)
    x_t = process.add_noise(x_0, eps, t)
    clipped = clip_denoised(lambda x, t: eps, process)(x_t, t)
    torch.testing.assert_close(process.predict_x_0(x_t, clipped, t), x_0.clamp(-1, 1), rtol=0, atol=1e-9)
    inside = x_0[0].abs() <= 1 - 1e-9
    torch.testing.assert_close(clipped[:, inside], eps[:, inside], rtol=0, atol=1e-9)
