"""Noise processes against diffusers' schedules, numerical integration and their own inverses."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from scalelong import counter
from scalelong.counter import Stream
from scalelong.errors import InvalidValueError
from scalelong.process import PROCESSES, VPSDE, get_process

every_process = pytest.mark.parametrize("name", PROCESSES)
SCHEDULERS = {
    "ddpm": {},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "sd": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_discrete_schedules_equal_diffusers(name):
    theirs = DDPMScheduler(**SCHEDULERS[name])
    ours = get_process(name).alpha_bar(torch.arange(1, 1001))
    # diffusers computes β and their cumulative product in float32; 1 − 0.999, the last β of "cosine", loses 4 digits.
    lost = 100 if name == "cosine" else 1
    torch.testing.assert_close(ours, (1 - theirs.betas.double()).cumprod(0), rtol=lost * 5e-7, atol=0)
    torch.testing.assert_close(ours, theirs.alphas_cumprod.double(), rtol=lost * 2e-6, atol=0)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_add_noise_equals_diffusers(name):
    x_0, eps = torch.randn(2, 5, 3, 4, 4)
    n = torch.tensor([1, 2, 500, 999, 1000])
    expected = DDPMScheduler(**SCHEDULERS[name]).add_noise(x_0, eps, n - 1)
    torch.testing.assert_close(get_process(name).add_noise(x_0, eps, n), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("t", [0.0, 1e-6, 1e-3, 0.3, 1.0])
def test_log_alpha_bar_of_the_vp_sde_is_the_integral_of_beta(t):
    process = VPSDE()
    integral, _ = quad(lambda s: float(process.beta(s)), 0, t)
    assert float(process.log_alpha_bar(t)) == pytest.approx(-integral, rel=1e-12, abs=1e-15)


@every_process
def test_betas_multiply_to_alpha_bar(name):
    process = get_process(name)
    torch.testing.assert_close((1 - process.betas()).cumprod(0), process.alpha_bar(process.grid()), rtol=1e-12, atol=0)
    # The same through diffusers in float32:
    theirs = DDPMScheduler(trained_betas=process.betas().numpy()).alphas_cumprod
    rtol = 1e-4 if name == "cosine" else 2e-6
    torch.testing.assert_close(theirs.double(), process.alpha_bar(process.grid()), rtol=rtol, atol=0)


def test_the_mean_of_alpha_bar_is_the_papers():
    assert get_process("ddpm").alpha_bar(torch.arange(1, 1001)).mean().item() == pytest.approx(0.27, abs=0.01)


@every_process
@given(u=st.floats(1e-6, 1.0))
@settings(max_examples=100, deadline=None)
def test_inverse_lambda_inverts_lambda(name, u):
    process = get_process(name)
    t = process.t_max * u
    lambda_ = process.lambda_(t)
    assert float(process.inverse_lambda(lambda_)) == pytest.approx(t, rel=1e-9)
    alpha, sigma = process.alpha(t), process.sigma(t)
    assert float((alpha / sigma).log()) == pytest.approx(float(lambda_), abs=1e-9)
    assert float(alpha**2 + sigma**2) == pytest.approx(1.0, abs=1e-15)


@every_process
def test_schedules_are_finite_on_their_whole_range(name):
    process = get_process(name)
    ends = torch.tensor([process.t_max * 2.0**-24, process.t_min, process.t_max], dtype=torch.float64)
    for value in (process.alpha_bar(ends), process.sigma(ends), process.lambda_(ends), process.network_time(ends)):
        assert value.isfinite().all()
    assert process.alpha_bar(0.0) == 1.0
    assert process.sigma(0.0) == 0.0
    assert process.lambda_(0.0) == float("inf")
    assert process.lambda_(ends).diff().lt(0).all()


def test_the_network_receives_the_timesteps_of_the_papers_networks():
    t = torch.tensor([0.0, 0.5, 1.0])
    assert get_process("vp").network_time(t).tolist() == [0.0, 499.5, 999.0]
    n = torch.tensor([1.0, 500.5, 1000.0])
    assert get_process("ddpm").network_time(n).tolist() == [0.0, 499.5, 999.0]
    assert get_process("sd").network_time(n).tolist() == [1.0, 500.5, 1000.0]


def test_training_times_cover_the_process_evenly():
    u = counter.uniform(0, Stream.TIME, 0, 0, 200_000)
    assert torch.equal(get_process("vp").times(u), u)
    for name in ("ddpm", "cosine", "sd"):
        n = get_process(name).times(u)
        counts = torch.bincount(n.long(), minlength=1001)
        assert n.dtype == torch.float32
        assert counts[0] == 0
        assert len(counts) == 1001
        assert counts[1:].min() > 200 - 5 * 200**0.5
        assert counts[1:].max() < 200 + 5 * 200**0.5
        ends = torch.tensor([2.0**-24, 1 - 2.0**-24])
        assert get_process(name).times(ends).tolist() == [1.0, 1000.0]


@every_process
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_add_noise_keeps_the_images_dtype(name, dtype, tolerance):
    process = get_process(name)
    x_0, eps = torch.randn(2, 4, 2, 3, 3, dtype=torch.float64)
    t = process.t_max * torch.tensor([0.1, 0.3, 0.6, 0.9])
    x_t = process.add_noise(x_0.to(dtype), eps.to(dtype), t)
    assert x_t.dtype == dtype
    torch.testing.assert_close(x_t.double(), process.add_noise(x_0, eps, t), rtol=tolerance, atol=tolerance)


@every_process
def test_predict_x_0_and_predict_eps_invert_equation_1(name):
    process = get_process(name)
    x_0, eps = torch.randn(2, 4, 2, 3, 3, dtype=torch.float64)
    t = process.t_max * torch.tensor([1e-3, 0.3, 0.6, 1.0])
    x_t = process.add_noise(x_0, eps, t)
    torch.testing.assert_close(process.predict_x_0(x_t, eps, t), x_0, rtol=0, atol=1e-10)
    torch.testing.assert_close(process.predict_eps(x_t, x_0, t), eps, rtol=0, atol=1e-10)


@every_process
def test_a_process_round_trips_through_json(name):
    process = get_process(name)
    assert get_process(json.loads(json.dumps(process.to_dict()))) == process
    assert get_process(process) is process


def test_get_process_accepts_a_mapping():
    assert get_process({"name": "vp", "beta_max": 10.0}) == VPSDE(0.1, 10.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("vpp", "did you mean 'vp'"),
        ("dpm", "did you mean 'ddpm'"),
        ({}, "unknown process"),
        ({"name": "vp", "beta_maximum": 3}, "did you mean 'beta_max'"),
        ({"name": "vp", "beta_max": 0.05}, "beta_max.*0.05"),
        ({"name": "sd", "beta_end": 1.5}, "beta_end.*1.5"),
    ],
)
def test_an_invalid_process_raises_with_a_suggestion(spec, message):
    with pytest.raises(InvalidValueError, match=message):
        get_process(spec)
