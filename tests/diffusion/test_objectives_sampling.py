"""Every sampler with every objective: the exact law of Gaussian data, and the steps of diffusers' schedulers."""

from __future__ import annotations

import diffusers
import pytest
import torch
from gaussian_data import GaussianData

from scalelong import counter
from scalelong.cli import _names
from scalelong.counter import Stream
from scalelong.diffusion import SAMPLERS, clip_denoised, get_objective, get_sampler, guided, sample
from scalelong.diffusion.schedulers import EDM, FLOW, NOISE, SCHEDULERS
from scalelong.errors import InvalidValueError, UnknownNameError
from scalelong.objective import Denoised, Objective
from scalelong.process import get_process

DATA = GaussianData()
OBJECTIVES = {
    "eps on vp": get_objective("eps", process="vp"),
    "eps on linear": get_objective("eps", process="linear"),
    "eps on edm": get_objective("eps", process="edm"),
    "x0 on cosine": get_objective("x0", process="cosine"),
    "x0 on linear": get_objective("x0", process="linear"),
    "v on sd": get_objective("v", process="sd"),
    "v on vp": get_objective("v", process="vp"),
    "flow": get_objective("flow"),
    "flow on vp": get_objective("flow", process="vp"),
    "edm": get_objective("edm"),
    "edm on vp": get_objective("edm", process="vp"),
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)
# diffusers calls np.array on a tensor, which NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")


def exact_network(objective, data=DATA, low=1e-9):
    """E[F | x_t] for pixels x_0 ~ N(μ, s²), as a function of what the network is called with."""

    def net(x, time, y=None):
        u = torch.linspace(low, 1, 20_001, dtype=torch.float64) * objective.process.t_max
        k = torch.searchsorted(objective.process.network_time(u).contiguous(), time[0].double()).clamp(1, 20_000)
        times = objective.process.network_time(u[k - 1 : k + 1])
        t = torch.lerp(u[k - 1], u[k], ((time[0] - times[0]) / (times[1] - times[0])).double())[None]
        c = objective.coefficients(t)
        mean = data.mean if y is None else (2.0 * y - 1).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * data.mean
        x_t = x / objective.input_scale(t).to(x.dtype)
        variance = (c.alpha * data.std) ** 2 + c.sigma**2
        slope = ((c.alpha * c.p * data.std**2 + c.sigma * c.q) / variance).to(x.dtype)
        return c.p.to(x.dtype) * mean + slope * (x_t - c.alpha.to(x.dtype) * mean)

    return net


def images(objective, sampler, steps=60, n=64, **arguments):
    shape = (1, 16, 16)  # 16,384 independent pixels of one law
    net = exact_network(objective)
    return torch.cat(list(sample(net, n, shape, objective, sampler=sampler, steps=steps, clip=False, **arguments)))


def served(name, sampler):
    return not get_sampler(sampler).continuous_only or OBJECTIVES[name].process.name == "vp"


class TestOurSamplers:
    @every_objective
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_samples_have_the_mean_and_the_spread_of_the_data(self, name, sampler):
        objective = OBJECTIVES[name]
        if not served(name, sampler):
            with pytest.raises(InvalidValueError, match=f"{sampler}.*{objective.process.name}"):
                images(objective, sampler)
            return
        x = images(objective, sampler, steps=200 if sampler.startswith(("ddpm", "euler")) else 60)
        # Standard errors are 0.004 and 0.003; steps of order 1 lose 3 to 6 % of the spread.
        assert x.mean().item() == pytest.approx(DATA.mean, abs=0.025)
        assert x.std().item() == pytest.approx(DATA.std, abs=0.05)

    @every_objective
    def test_pixels_stay_independent(self, name):
        """The covariance of neighbours is 0, as the data's."""
        x = images(OBJECTIVES[name], "dpm-solver++").squeeze(1) - DATA.mean
        assert (x[:, :, 1:] * x[:, :, :-1]).mean().abs().item() < 0.02 * DATA.std**2 + 0.01

    @pytest.mark.parametrize("name", ["eps on linear", "x0 on linear", "flow", "edm", "v on vp"])
    def test_one_step_from_pure_noise_is_the_mean_prediction(self, name):
        x = images(OBJECTIVES[name], "ddim", steps=1)
        assert x.mean().item() == pytest.approx(DATA.mean, abs=0.02)
        assert x.std().item() < 0.02

    @pytest.mark.parametrize("steps", [20, 50])
    def test_noise_prediction_on_linear_is_as_accurate_as_image_prediction(self, steps):
        """At t = 1 the optimal ε̂ is x itself, whatever the data are; the first step must not ask there."""
        x_T = torch.linspace(-2, 2, 9, dtype=torch.float64).reshape(9, 1, 1, 1)
        errors = []
        for name in ("eps on linear", "x0 on linear"):
            objective = OBJECTIVES[name]
            predict = guided(exact_network(objective), objective)
            x = get_sampler("dpm-solver++")(predict, x_T, objective.process, steps)
            errors.append((x - (DATA.mean + DATA.std * x_T)).abs().max().item())
        assert errors[0] == pytest.approx(errors[1], abs=1e-3)

    def test_clipping_holds_at_the_first_step_on_linear(self):
        x_T = torch.linspace(-3, 3, 9).reshape(9, 1, 1, 1)
        process = get_process("linear")
        predict = clip_denoised(guided(lambda x, t: 0.9 * x, process), process)
        assert get_sampler("ddim")(predict, x_T, process, 1).abs().max() <= 1 + 1e-4

    @pytest.mark.parametrize("name", ["eps on vp", "eps on edm", "eps on linear"])
    def test_the_larger_variance_of_ddpm_keeps_data_of_unit_variance(self, name):
        """β is exact for x_0 ~ N(0, 1) in variance-preserving coordinates, from which others differ by a factor."""
        objective, data = OBJECTIVES[name], GaussianData(0.0, 1.0)
        net = exact_network(objective, data)
        parts = sample(net, 64, (1, 16, 16), objective, sampler="ddpm-large", steps=50, clip=False)
        assert torch.cat(list(parts)).std().item() == pytest.approx(1.0, abs=0.02)

    def test_an_image_does_not_depend_on_its_batch(self):
        for sampler in ("dpm-solver++", "EulerAncestralDiscreteScheduler", "EDMEulerScheduler"):
            one = images(OBJECTIVES["edm"], sampler, steps=8, n=6, batch_size=2)
            torch.testing.assert_close(images(OBJECTIVES["edm"], sampler, steps=8, n=6, batch_size=6), one)

    @every_objective
    def test_guidance_moves_every_objective_as_it_moves_noise(self, name):
        """y = 1 has mean μ and y = 0 has −μ; guidance g has x̂_0 of uncond + g·(cond − uncond)."""
        objective = OBJECTIVES[name]
        x, t = counter.normal(0, Stream.SAMPLE, 0, 0, 4, (1, 4, 4)).double(), torch.full((4,), 0.5).double()
        t = t * objective.process.t_max
        y, net = torch.ones(4).long(), exact_network(objective)
        parts = [guided(net, objective, g, y=y, null_y=0)(x, t) for g in (0.0, 1.0, 3.0)]
        pairs = [p if isinstance(p, Denoised) else objective.denoised(x, p, t) for p in parts]
        for null, conditional, both in zip(*pairs, strict=True):
            torch.testing.assert_close(both, null + 3 * (conditional - null), rtol=1e-6, atol=1e-6)
        assert (pairs[2].x_0 > pairs[1].x_0).all()

    @every_objective
    def test_clipped_predictions_stay_in_range(self, name):
        objective = OBJECTIVES[name]
        process, t = objective.process, torch.full((4,), 0.6) * objective.process.t_max
        x = 3 * process.norm(t[0]).float() * counter.normal(0, Stream.SAMPLE, 0, 0, 4, (1, 4, 4))
        predicted = clip_denoised(guided(lambda x, t: 2 * x, objective), process)(x, t)
        x_0 = predicted.x_0 if isinstance(predicted, Denoised) else process.predict_x_0(x, predicted, t)
        assert x_0.abs().max().item() <= 1 + 1e-4
        assert (x_0.abs() > 0.99).any()


class TestSchedulers:
    def test_names_of_the_command_line_are_the_registrys(self):
        assert set(_names.SCHEDULERS) == set(SCHEDULERS) - {"DPMSolverSDEScheduler"}
        assert tuple(SAMPLERS) == _names.SAMPLERS

    @pytest.mark.parametrize("scheduler", [name for name in NOISE if name != "DPMSolverSDEScheduler"])
    @pytest.mark.parametrize("name", ["eps on vp", "v on sd", "flow", "edm"])
    def test_schedulers_for_noise_serve_every_objective(self, name, scheduler):
        x = images(OBJECTIVES[name], scheduler, steps=50)
        assert x.mean().item() == pytest.approx(DATA.mean, abs=0.04)
        assert x.std().item() == pytest.approx(DATA.std, abs=0.06)

    @pytest.mark.parametrize(
        ("name", "scheduler"),
        [("flow", s) for s in FLOW] + [("eps on linear", FLOW[0]), ("x0 on linear", FLOW[0])]
        + [("edm", s) for s in EDM] + [("eps on edm", EDM[0])],
    )  # fmt: skip
    def test_schedulers_of_flow_matching_and_edm_serve_their_process(self, name, scheduler):
        x = images(OBJECTIVES[name], scheduler, steps=60)
        assert x.mean().item() == pytest.approx(DATA.mean, abs=0.02)
        assert x.std().item() == pytest.approx(DATA.std, abs=0.05)

    @pytest.mark.parametrize(("name", "scheduler"), [("eps on vp", FLOW[0]), ("flow", EDM[0]), ("v on sd", EDM[1])])
    def test_a_scheduler_of_another_path_is_refused_with_the_reason(self, name, scheduler):
        with pytest.raises(InvalidValueError, match=f"{scheduler}.*{OBJECTIVES[name].process.name}.*x_t ="):
            images(OBJECTIVES[name], scheduler)

    @pytest.mark.parametrize("scheduler", ["LCMScheduler", "DDIMInverseScheduler", "DPMSolverSDEScheduler"])
    def test_other_schedulers_are_refused_with_the_reason(self, scheduler):
        with pytest.raises(InvalidValueError, match=scheduler):
            get_sampler(scheduler)

    def test_a_misspelt_scheduler_is_suggested(self):
        with pytest.raises(UnknownNameError, match="did you mean 'EulerDiscreteScheduler'"):
            get_sampler("EulerDiscretScheduler")

    def test_evaluations_stay_within_the_budget(self):
        for scheduler in ("HeunDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "PNDMScheduler", "DDIMScheduler"):
            calls, objective = [], OBJECTIVES["flow"]
            net = exact_network(objective)
            made = list(
                sample(
                    lambda x, t, net=net, calls=calls: (calls.append(1), net(x, t))[1],
                    1,
                    (1, 2, 2),
                    objective,
                    sampler=scheduler,
                    steps=20,
                )
            )
            assert made[0].isfinite().all()
            assert len(calls) == get_sampler(scheduler).evaluations(20)
            assert 18 <= len(calls) <= 20


class TestAgainstDiffusers:
    """Steps of networks that are not affine, next to diffusers' own loops."""

    X = counter.normal(0, Stream.SAMPLE, 0, 0, 4, (1, 4, 4))

    @staticmethod
    def network(x, time):
        return torch.sin(2 * x + x.roll(1, -1)) + torch.cos(time / 300).reshape(-1, 1, 1, 1) * x

    def ours(self, objective, sampler, steps):
        process = objective.process
        return get_sampler(sampler)(guided(self.network, objective), process.prior_std * self.X, process, steps)

    @pytest.mark.parametrize("steps", [1, 2, 10, 40])
    def test_ddim_on_the_straight_path_is_FlowMatchEulerDiscreteScheduler(self, steps):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        x = self.X
        for step in scheduler.timesteps:
            x = scheduler.step(self.network(x, step.expand(4)), step, x).prev_sample
        torch.testing.assert_close(self.ours(get_objective("flow"), "ddim", steps), x, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("steps", [2, 10, 40])
    def test_edm_by_name_is_EDMEulerScheduler_s_own_loop(self, steps):
        objective = get_objective("edm")
        scheduler = diffusers.EDMEulerScheduler(sigma_data=0.5)
        scheduler.set_timesteps(steps)
        x = self.X * scheduler.init_noise_sigma
        low, high = torch.tensor([0.002, 80.0]).log().tolist()
        for step in scheduler.timesteps:
            time = 1000 * (4 * step - low) / (high - low)
            x = scheduler.step(self.network(scheduler.scale_model_input(x, step), time.expand(4)), step, x).prev_sample
        sampler = get_sampler("EDMEulerScheduler")
        ours = sampler(guided(self.network, objective), 80 * self.X, objective.process, steps, lambda k: self.X)
        torch.testing.assert_close(ours, x, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(("name", "kind"), [("v", "v_prediction"), ("x0", "sample")])
    @pytest.mark.parametrize("steps", [1, 10, 50])
    def test_ddim_equals_DDIMScheduler_of_the_same_prediction_type(self, name, kind, steps):
        process = get_process("sd")
        settings = {"trained_betas": process.betas().numpy(), "clip_sample": False, "timestep_spacing": "trailing"}
        scheduler = diffusers.DDIMScheduler(**settings, prediction_type=kind)
        scheduler.set_timesteps(steps)
        x = self.X
        for step in scheduler.timesteps:
            x = scheduler.step(self.network(x, (step + 1).float().expand(4)), step, x).prev_sample
        torch.testing.assert_close(self.ours(Objective(process, target=name), "ddim", steps), x, rtol=1e-4, atol=1e-4)
