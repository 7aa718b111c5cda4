"""Samplers on data with a known noise prediction: correct mean and variance, error of the stated order."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from gaussian_data import GaussianData, output_law
from scipy.integrate import solve_ivp

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion import PROCESSES, SAMPLERS, get_process, get_sampler
from scalelong.diffusion.samplers import euler_grid, singlestep_orders, trailing_indices
from scalelong.errors import InvalidValueError, UnknownNameError

PAIRS = [(s, p) for s in SAMPLERS for p in PROCESSES if PROCESSES[p].continuous or not SAMPLERS[s].continuous_only]
every_pair = pytest.mark.parametrize(("name", "process_name"), PAIRS)
DATA = GaussianData()


def end_of(sampler, process):
    """The singlestep solvers stop at t_min; the others reach t = 0."""
    return process.t_min if sampler.name in ("dpm-solver-fast", "dpm-solver++3s") else 0.0


def draws(shape):
    return lambda k: counter.normal(0, Stream.SAMPLE, k + 1, 0, shape[0], shape[1:])


class TestOnGaussianData:
    @every_pair
    def test_mean_and_std_equal_the_datas_at_the_default_steps(self, name, process_name):
        sampler, process = get_sampler(name), get_process(process_name)
        steps = min(sampler.default_steps, 400)
        law = output_law(sampler, process, DATA, steps)
        mean, std = DATA.marginal(process, end_of(sampler, process))
        # First-order samplers err by about 2 % of the spread at 400 steps and by 6 % at 50, higher orders by less.
        tolerances = {"ddpm": 0.012, "ddpm-large": 0.012, "ddim": 0.035, "dpm-solver++": 0.02, "dpm-solver-fast": 5e-4}
        tolerances["dpm-solver++3s"] = 0.025  # uniform in time: its last steps are long in λ
        tolerance = tolerances.get(name, 2e-3) * (3 if process_name == "cosine" else 1)  # its λ starts at −10, not −5
        assert law.mean == pytest.approx(mean, abs=1e-3)
        assert law.std == pytest.approx(std, abs=tolerance)

    @every_pair
    def test_starting_from_the_prior_costs_at_most_the_signal_left_at_t_max(self, name, process_name):
        # x_T ~ N(0, 1) in place of N(αμ, α²s² + σ²): the mean is off by at most α(t_max)·μ times the flow's slope s.
        sampler, process = get_sampler(name), get_process(process_name)
        right, used = (output_law(sampler, process, DATA, 200, prior=prior) for prior in (False, True))
        left = float(process.alpha(process.t_max))
        assert abs(right.mean - used.mean) <= 1.05 * left * DATA.mean
        assert abs(right.std - used.std) <= 1.05 * left

    @pytest.mark.parametrize(
        ("name", "steps", "order"),
        [
            ("euler-maruyama", (50, 100, 200, 400), 1.15),  # the drift's order 1, and the noise's a little above
            ("euler-ode", (50, 100, 200, 400), 1.0),
            ("dpm-solver-fast", (26, 50, 101, 200, 401), 3.1),
            ("ddpm", (50, 100, 200, 400), 0.85),  # 1 in the limit
            ("ddim", (25, 50, 100, 200), 1.0),
        ],
    )
    def test_the_error_decreases_at_the_samplers_order(self, name, steps, order):
        sampler, process = get_sampler(name), get_process("vp")
        _, std = DATA.marginal(process, end_of(sampler, process))
        errors = [abs(output_law(sampler, process, DATA, n).std - std) for n in steps]
        slope = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
        assert slope == pytest.approx(order, abs=0.15)

    @pytest.mark.parametrize(("name", "order"), [("ddim", 1.0), ("dpm-solver++", 2.0)])
    def test_the_order_half_way(self, name, order):
        # DPM-Solver++ ends with a first-order step to σ = 0, so its order is measured half way.
        process = get_process("vp")
        x_T = torch.tensor([[2.0]], dtype=torch.float64)
        errors, steps = [], (20, 40, 50, 100)
        for n in steps:
            trajectory = []

            def eps_fn(x, t, trajectory=trajectory):
                trajectory.append((t.item(), x))
                return DATA.eps(process)(x, t)

            get_sampler(name)(eps_fn, x_T, process, n)
            t, x = min(trajectory, key=lambda point: abs(point[0] - 0.5))
            errors.append((x - DATA.ode_solution(process, x_T, t)).abs().item())
        slope = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
        assert slope == pytest.approx(order, abs=0.25)

    def test_dpm_solver_fast_follows_each_point_of_the_flow(self):
        x_T = torch.linspace(-3, 3, 11, dtype=torch.float64)[:, None]
        for name in PROCESSES:
            process = get_process(name)
            x = get_sampler("dpm-solver-fast")(DATA.eps(process), x_T, process, 50)
            torch.testing.assert_close(x, DATA.ode_solution(process, x_T, process.t_min), rtol=0, atol=3e-3)

    def test_samples_of_euler_maruyama_have_the_predicted_law(self):
        # With real noise: 20,000 images, standard errors of std/√n.
        sampler, process, n = get_sampler("euler-maruyama"), get_process("vp"), 20_000
        x = sampler(DATA.eps(process), draws((n, 1))(-1), process, 100, draws((n, 1)))
        law = output_law(sampler, process, DATA, 100, prior=True)
        assert x.mean().item() == pytest.approx(law.mean, abs=4 * law.std / math.sqrt(n))
        assert x.std().item() == pytest.approx(law.std, abs=4 * law.std / math.sqrt(2 * n))


class TestAgainstScipy:
    """A mixture of two Gaussians: a flow that is not affine."""

    means, std = np.array([-0.8, 0.5]), 0.3

    def eps(self, process):
        def eps_fn(x, t):
            alpha, sigma = (f(t).to(x).reshape(-1, 1) for f in (process.alpha, process.sigma))
            variance = (alpha * self.std) ** 2 + sigma**2
            away = torch.stack([x - alpha * mean for mean in self.means])  # (2, B, 1)
            weight = torch.softmax(-0.5 * away**2 / variance, 0)
            return sigma * (weight * away).sum(0) / variance

        return eps_fn

    def solution(self, process, x_T, t_end):
        eps_fn = self.eps(process)

        def slope(t, x):
            eps = eps_fn(torch.from_numpy(x)[:, None], torch.full((len(x),), t, dtype=torch.float64)).numpy()[:, 0]
            return float(process.beta(t)) * 0.5 * (eps / float(process.sigma(t)) - x)

        return solve_ivp(slope, (1.0, t_end), x_T.numpy()[:, 0], rtol=1e-9, atol=1e-11).y[:, -1]

    @pytest.mark.parametrize(
        ("name", "steps", "tolerance"),
        [("euler-ode", 1000, 3e-3), ("dpm-solver-fast", 50, 3e-3), ("dpm-solver-fast", 149, 1e-4)],
    )
    def test_deterministic_samplers_solve_the_probability_flow(self, name, steps, tolerance):
        process = get_process("vp")
        x_T = torch.linspace(-2.5, 2.5, 8, dtype=torch.float64)[:, None]
        x = get_sampler(name)(self.eps(process), x_T, process, steps)
        t_end = process.t_min if name == "dpm-solver-fast" else 1e-7
        np.testing.assert_allclose(x[:, 0], self.solution(process, x_T, t_end), rtol=0, atol=tolerance)


class TestContract:
    @every_pair
    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 17, 50])
    def test_steps_equal_evaluations_and_the_output_is_finite(self, name, process_name, steps):
        sampler, process = get_sampler(name), get_process(process_name)
        times = []

        def eps_fn(x, t):
            assert t.shape == (4,)
            assert t.eq(t[0]).all()
            times.append(t[0].item())
            return DATA.eps(process)(x, t)

        x_T = draws((4, 2, 3))(-1)
        x = sampler(eps_fn, x_T, process, steps, draws((4, 2, 3)))
        assert len(times) == steps == sampler.evaluations(steps)
        assert times[0] == pytest.approx(process.t_max)
        assert min(times) >= process.t_min * (1 - 1e-6)
        assert all(later < earlier for earlier, later in pairwise(times))
        assert x.shape == x_T.shape
        assert x.dtype == x_T.dtype
        assert x.isfinite().all()
        assert torch.equal(x_T, draws((4, 2, 3))(-1))  # not modified in place

    @every_pair
    def test_only_stochastic_samplers_draw_noise_and_only_from_the_argument(self, name, process_name):
        sampler, process = get_sampler(name), get_process(process_name)
        draws_made = []

        def noise(k):
            draws_made.append(k)
            return draws((2, 3))(k)

        before = torch.get_rng_state()
        sampler(DATA.eps(process), draws((2, 3))(-1), process, 9, noise)
        assert torch.equal(torch.get_rng_state(), before)
        assert bool(draws_made) == sampler.stochastic
        assert len(set(draws_made)) == len(draws_made)
        if sampler.stochastic:
            with pytest.raises(InvalidValueError, match=f"noise.*{re.escape(name)}"):
                sampler(DATA.eps(process), draws((2, 3))(-1), process, 9)

    def test_the_last_step_of_euler_maruyama_adds_no_noise(self):
        draws_made = []
        noise = lambda k: draws_made.append(k) or draws((2, 3))(k)
        get_sampler("euler-maruyama")(DATA.eps(get_process("vp")), draws((2, 3))(-1), get_process("vp"), 9, noise)
        assert draws_made == list(range(8))

    def test_the_default_is_50_evaluations_in_16_steps_of_order_3_and_one_of_order_2(self):
        assert get_sampler("dpm-solver-fast").evaluations() == 50
        assert singlestep_orders(50) == [3] * 16 + [2]

    @pytest.mark.parametrize("n", range(1, 40))
    def test_singlestep_orders_spend_the_budget_and_decrease(self, n):
        orders = singlestep_orders(n)
        assert sum(orders) == n
        assert len(orders) == n // 3 + 1  # as Lu et al. count the intervals
        assert orders == sorted(orders, reverse=True)

    def test_the_euler_grid_is_the_papers(self):
        assert euler_grid(1000)[::-1] == pytest.approx([0.0, *np.linspace(1e-3, 1, 1000)], abs=1e-15)
        assert euler_grid(1) == [1.0, 0.0]

    @pytest.mark.parametrize("steps", [1, 2, 3, 7, 30, 49, 300, 999, 1000])
    def test_trailing_indices_start_at_999_and_decrease(self, steps):
        grid = trailing_indices(steps)
        assert len(grid) == steps
        assert grid[0] == 999
        assert grid[-1] >= 0
        assert all(later < earlier for earlier, later in pairwise(grid))

    def test_a_misspelt_name_raises_with_a_suggestion(self):
        with pytest.raises(UnknownNameError, match=r"did you mean 'dpm-solver\+\+'"):
            get_sampler("dpm-solver+")
        with pytest.raises(UnknownNameError, match="did you mean 'euler-maruyama'"):
            get_sampler("euler_maruyama")

    @pytest.mark.parametrize("name", ["euler-maruyama", "euler-ode"])
    @pytest.mark.parametrize("process_name", ["ddpm", "sd"])
    def test_euler_rejects_discrete_processes(self, name, process_name):
        with pytest.raises(InvalidValueError, match=f"got '{process_name}'"):
            get_sampler(name).check(get_process(process_name), 10)

    @pytest.mark.parametrize("name", SAMPLERS)
    def test_invalid_steps_raise(self, name):
        sampler, process = get_sampler(name), get_process("vp")
        for steps in (0, -3, *([1001] if sampler.max_steps else [])):
            with pytest.raises(InvalidValueError, match=f"steps.*got {steps}"):
                sampler.check(process, steps)
