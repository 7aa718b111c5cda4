"""The kernels compute what torch computes, to float32's rounding, and step aside where they cannot be used."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scalelong.native import GELU, AdamW, attention, available, average_, clip_, distances, norms
from scalelong.native.attention import by_formula, by_torch
from scalelong.native.library import library, usable

needs_compiler = pytest.mark.skipif(not available(), reason="no C compiler here")


def exact_attention(qkv: Tensor, heads: int) -> Tensor:
    """In float64, by the formula."""
    B, L, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.double().view(B, L, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / (D // heads) ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(B, L, D)


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 3), st.sampled_from([16, 32, 64]), st.floats(0.1, 10.0))
def test_attention_and_its_gradient_are_those_of_the_formula(B: int, L: int, H: int, d: int, size: float) -> None:
    generator = torch.Generator().manual_seed(B * 1000 + L)
    qkv = size * torch.randn(B, L, 3 * H * d, generator=generator)
    g = torch.randn(B, L, H * d, generator=generator)
    mine, theirs = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    assert usable(mine)
    out, expected = attention(mine, H), exact_attention(theirs, H)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6 * size * (1 + size**2))
    (back,) = torch.autograd.grad(out, mine, g)
    (pulled,) = torch.autograd.grad(expected, theirs, g.double())
    assert (back - pulled).norm() <= 1e-5 * (1 + size**2) * pulled.norm() + 1e-6


@needs_compiler
def test_attention_whose_scores_are_far_apart_or_far_below_zero_stays_finite() -> None:
    q, k = torch.full((1, 5, 16), 30.0), -torch.arange(1.0, 6.0)[None, :, None].expand(1, 5, 16)
    qkv = torch.cat([q, 30 * k, torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))], -1).requires_grad_()
    out = attention(qkv, 1)
    torch.testing.assert_close(out, exact_attention(qkv, 1).float())
    assert torch.autograd.grad(out.sum(), qkv)[0].isfinite().all()


@needs_compiler
def test_gelu_and_its_slope_are_within_a_rounding_of_the_exact_ones() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_003), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4])]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = GELU()(x), F.gelu(exact)
    assert ((y - expected).abs() <= 3e-7 * (1 + exact.abs())).all()
    (slope,) = torch.autograd.grad(y.sum(), x)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    assert (slope - expected_slope).abs().max() < 5e-7


@needs_compiler
def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")] * 5)
    assert GELU()(x).isnan().tolist() == [False, True, False] * 5
    qkv = torch.zeros(1, 3, 48)
    qkv[0, 0, 0] = float("nan")
    assert not attention(qkv, 1).isfinite().all()


@needs_compiler
def test_threads_change_no_bit() -> None:
    loaded = library()
    assert loaded is not None
    qkv = torch.randn(4, 17, 3 * 64, generator=torch.Generator().manual_seed(0))
    outs = []
    for threads in (1, 2):
        out, logs = torch.empty(4, 17, 64), torch.empty(4, 4, 17)
        loaded.attention_forward(qkv.data_ptr(), out.data_ptr(), logs.data_ptr(), 4, 17, 4, 16, threads)
        outs.append(out)
    assert torch.equal(*outs)


@needs_compiler
def test_a_gradient_of_the_gradient_is_torchs() -> None:
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    for run, plain in ((lambda z: attention(z, 1), lambda z: by_formula(z, 1)), (GELU(), F.gelu)):
        found = []
        for function in (run, plain):
            z = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(function(z).square().sum(), z, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), z)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.func.jvp's own
def test_kernels_step_aside_for_transforms_counters_and_other_types() -> None:
    qkv = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    assert not usable(qkv.double())
    assert not usable(qkv.transpose(0, 1))
    slope = torch.func.grad(lambda z: attention(z, 1).square().sum())(qkv)
    torch.testing.assert_close(slope, torch.func.grad(lambda z: by_torch(z, 1).square().sum())(qkv))
    _, pushed = torch.func.jvp(GELU(), (qkv,), (torch.ones_like(qkv),))
    torch.testing.assert_close(pushed, torch.func.jvp(F.gelu, (qkv,), (torch.ones_like(qkv),))[1])
    with FlopCounterMode(display=False):
        assert not usable(qkv)


def trained(optimizer: type[torch.optim.AdamW], steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    chosen = optimizer(net.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(steps):
        chosen.zero_grad()
        net(torch.randn(16, 7)).square().sum().backward()
        chosen.step()
    return [*net.parameters(), *(state["exp_avg_sq"] for state in chosen.state.values())]


def test_adamw_takes_the_steps_of_torchs() -> None:
    for mine, theirs in zip(trained(AdamW, 20), trained(torch.optim.AdamW, 20), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_adamw_leaves_what_the_kernel_cannot_do_to_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdamW([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.tolist() == pytest.approx([0.798] * 3, abs=1e-2)
    assert optimizer.state[weight]["step"] == 2


@pytest.mark.parametrize("limit", [0.5, 1e6, float("nan")])
def test_clipping_is_torchs(limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3,), (100, 70), (1,))]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, g in zip(parameters, gradients, strict=True):
        parameter.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    mine = clip_(gradients, limit)
    if mine is None:
        pytest.skip("no C compiler here")
    torch.testing.assert_close(mine, norm)
    for parameter, g in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(g, parameter.grad, equal_nan=True)


@needs_compiler
def test_norms_and_distances_are_those_of_float64() -> None:
    a = [torch.randn(n) for n in (1, 7, 4096, 4097, 10_000)] + [torch.randn(3, 5), torch.zeros(0)]
    b = [x + 1e-4 * torch.randn_like(x) for x in a]  # close together: nothing may cancel
    apart, sizes = distances(a, b)  # type: ignore[misc]
    for found, expected in (
        (norms(a), [x.double().norm() for x in a]),
        (apart, [(x - y).double().norm() for x, y in zip(a, b, strict=True)]),
        (sizes, [y.double().norm() for y in b]),
    ):
        assert found == pytest.approx([float(value) for value in expected], rel=1e-6, abs=0)
    assert math.isnan(norms([torch.tensor([1.0, float("nan")])])[0])  # type: ignore[index]
    assert norms([torch.ones(2).double()]) is None
    assert distances([torch.ones(2)], [torch.ones(2).double()]) is None


def test_the_average_is_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    means, values = ([torch.randn(n, generator=generator) for n in (5, 1000)] for _ in range(2))
    expected = [0.9 * mean + 0.1 * value for mean, value in zip(copy.deepcopy(means), values, strict=True)]
    average_(means, values, 0.1)
    for mean, right in zip(means, expected, strict=True):
        torch.testing.assert_close(mean, right)


def test_switched_off_everything_is_torchs() -> None:
    code = (
        "import torch, scalelong.native as n; assert not n.available();"
        "x = torch.randn(2, 4, 48); assert torch.equal(n.GELU()(x), torch.nn.functional.gelu(x));"
        "assert n.clip_([x], 1.0) is None; print(n.attention(x, 1).shape)"
    )
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "SCALELONG_KERNELS": "0"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "torch.Size([2, 4, 16])", done.stderr
