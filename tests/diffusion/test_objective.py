"""L_simple against its definition and its exact minimum for Gaussian data; dropped conditions."""

from __future__ import annotations

import pytest
import torch
from gaussian_data import GaussianData
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion import PROCESSES, get_process, simple_loss
from scalelong.errors import InvalidValueError

every_process = pytest.mark.parametrize("name", PROCESSES)


def batch(process, size=6, shape=(3, 4, 4)):
    x_0 = counter.normal(0, Stream.ORDER, 0, 0, size, shape)
    eps = counter.normal(0, Stream.NOISE, 0, 0, size, shape)
    return x_0, process.times(counter.uniform(0, Stream.TIME, 0, 0, size)), eps


@every_process
def test_the_loss_of_each_sample_is_the_mean_squared_error_of_its_noise(name):
    process = get_process(name)
    x_0, t, eps = batch(process)
    net = nn.Conv2d(3, 3, 3, padding=1)
    loss = simple_loss(lambda x, t: net(x), process, x_0, t, eps)
    predicted = net(process.add_noise(x_0, eps, t))
    torch.testing.assert_close(loss.mean(), mse_loss(predicted, eps))
    for k in range(len(x_0)):
        torch.testing.assert_close(loss[k], mse_loss(predicted[k], eps[k]))
    loss.mean().backward()
    assert net.weight.grad.abs().sum() > 0


@every_process
def test_the_exact_prediction_reaches_the_exact_minimum(name):
    # For x_0 ~ N(μ, s²) the posterior variance of ε given x_t is α²s²/(α²s² + σ²).
    process, data = get_process(name), GaussianData()
    z, eps = counter.normal(1, Stream.NOISE, 0, 0, 2, (3, 20_000)).double()
    t = process.t_max * torch.tensor([0.05, 0.3, 0.7])
    exact = data.eps(process)
    loss = simple_loss(lambda x, timestep: exact(x, t), process, data.mean + data.std * z, t, eps)
    signal = (process.alpha(t) * data.std) ** 2
    minimum = signal / (signal + process.sigma(t) ** 2)
    torch.testing.assert_close(loss, minimum, rtol=5 * (2 / 20_000) ** 0.5, atol=0)


@every_process
def test_the_network_is_called_once_with_its_own_timestep_and_no_empty_condition(name):
    process, calls = get_process(name), []

    def net(x, t, **conditions):
        calls.append((t, conditions))
        return x

    x_0, t, eps = batch(process)
    simple_loss(net, process, x_0, t, eps)
    assert len(calls) == 1
    assert torch.equal(calls[0][0], process.network_time(t))
    assert calls[0][1] == {}


@given(drop=st.lists(st.booleans(), min_size=1, max_size=8))
def test_dropped_conditions_are_null_and_the_others_untouched(drop):
    process, received = get_process("vp"), {}

    def net(x, t, y, context):
        received.update(y=y, context=context)
        return x

    size = len(drop)
    y, context = torch.arange(size), torch.arange(1.0, 1 + size * 6).reshape(size, 3, 2)
    null_context = -torch.arange(6.0).reshape(3, 2)
    simple_loss(
        net,
        process,
        *batch(process, size),
        y=y,
        context=context,
        drop=torch.tensor(drop),
        null_y=10,
        null_context=null_context,
    )
    for k, dropped in enumerate(drop):
        assert received["y"][k] == (10 if dropped else k)
        assert torch.equal(received["context"][k], null_context if dropped else context[k])
    assert received["y"].dtype == torch.int64


def test_the_loss_is_float32_under_low_precision_and_float64_under_double():
    process = get_process("vp")
    x_0, t, eps = batch(process)
    assert simple_loss(lambda x, t: x.bfloat16(), process, x_0, t, eps).dtype == torch.float32
    assert simple_loss(lambda x, t: x, process, x_0.double(), t, eps.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("net", "arguments", "message"),
    [
        (lambda x, t: torch.cat([x, x], 1), {}, r"\(6, 3, 4, 4\).*\(6, 6, 4, 4\)"),
        (lambda x, t: {"sample": x}, {}, "output.*dict"),
        (lambda x, t, y: x, {"y": torch.zeros(6).long(), "drop": torch.ones(6).bool()}, "null_y.*None"),
        (lambda x, t, y: x, {"y": torch.zeros(6).long(), "drop": torch.ones(6), "null_y": 1}, "drop.*float32"),
        (
            lambda x, t, context: x,
            {"context": torch.zeros(6, 3, 2), "drop": torch.ones(6).bool(), "null_context": torch.zeros(4, 2)},
            r"null_context.*\(6, 3, 2\).*\(4, 2\)",
        ),
    ],
)
def test_invalid_outputs_and_conditions_are_named(net, arguments, message):
    process = get_process("vp")
    with pytest.raises(InvalidValueError, match=message):
        simple_loss(net, process, *batch(process), **arguments)
