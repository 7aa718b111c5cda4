"""Objectives against closed forms, diffusers and each other: targets, conversions, times, weights, preconditioning."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr
from scipy.integrate import quad

from scalelong import counter
from scalelong._objectives import OBJECTIVES, PRECONDITIONS, PROCESSES, TARGETS, TIMES, WEIGHTS
from scalelong.counter import Stream
from scalelong.diffusion import convert, get_objective, get_process, simple_loss
from scalelong.errors import InvalidValueError
from scalelong.objective import Objective
from scalelong.process import EDM, INTERPOLANTS, Linear

every_process = pytest.mark.parametrize("process", INTERPOLANTS)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)
UNIFORMS = counter.uniform(0, Stream.TIME, 0, 0, 100_000)


def images_and_noise(n, shape=(2, 3, 3), dtype=torch.float64):
    return torch.randn(2, n, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def all_times(process):
    """Both ends and times between, float64."""
    return torch.cat([torch.tensor([0.0, 1e-4, 1e-3]), torch.linspace(0.01, 1, 40)]).double() * process.t_max


# --------------------------------------------------------------------------------- interpolants and conversions


def test_names_without_torch_are_those_of_the_registries():
    assert set(PROCESSES) == set(INTERPOLANTS)
    assert {Objective(get_process("vp"), target=target).target for target in TARGETS} == set(TARGETS)


@every_process
def test_derivatives_are_those_of_alpha_and_sigma(process):
    chosen = get_process(process)
    unit = 1 if chosen.continuous else 1000
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64) * chosen.t_max
    t = t if chosen.continuous else t.floor() + 0.5  # inside a step, where the table is interpolated
    h = 1e-6 * chosen.t_max
    d_alpha, d_sigma = chosen.derivatives(t)
    for exact, function in ((d_alpha, chosen.alpha), (d_sigma, chosen.sigma)):
        slope = unit * (function(t + h) - function(t - h)) / (2 * h)
        torch.testing.assert_close(exact.expand_as(t), slope.expand_as(t), rtol=1e-6, atol=1e-7)


def test_sigma_of_edm_is_karras_schedule_and_its_network_time_covers_the_embedding():
    process, theirs = EDM(), EDMEulerScheduler(num_train_timesteps=10)
    theirs.set_timesteps(11)
    torch.testing.assert_close(
        process.sigma(torch.linspace(1, 0, 11).double()), theirs.sigmas[:-1].double(), rtol=1e-5, atol=0
    )
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    time, c_noise = process.network_time(t), process.sigma(t).log() / 4
    assert time[[0, -1]].tolist() == pytest.approx([0, 1000])
    slopes = time.diff() / c_noise.diff()  # affine in c_noise
    torch.testing.assert_close(slopes, slopes[:1].expand(100), rtol=1e-6, atol=0)


@every_process
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(TARGETS, 2)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_conversions_round_trip_wherever_they_are_defined(process, source, target, dtype):
    chosen = get_process(process)
    t = all_times(chosen)
    alpha, sigma, finite = chosen.alpha(t), chosen.sigma(t), chosen.derivatives(t)[1].isfinite()
    defined = torch.ones(len(t), dtype=torch.bool)
    for name in (source, target):
        defined &= {"eps": alpha > 0, "x0": sigma > 0, "flow": finite}.get(name, torch.tensor(True))
    if process == "linear" and {source, target} == {"v", "flow"}:
        assert defined.all()
    t = t[defined]
    x_0, eps = images_and_noise(len(t), dtype=dtype)
    x_t = chosen.add_noise(x_0, eps, t)
    value = Objective(chosen, target=source).target_of(x_0, eps, t)
    other = convert(value, x_t, t, chosen, source, target)
    back = convert(other, x_t, t, chosen, target, source)
    scale = value.abs().flatten(1).amax(1).clamp(min=1).reshape(-1, 1, 1, 1)
    tolerance = 1e-6 if dtype == torch.float64 else 3e-3  # float32: 1e-7 over the smallest α or σ, 1e-4
    assert ((back - value) / scale).abs().max() < tolerance
    if dtype == torch.float64:
        expected = Objective(chosen, target=target).target_of(x_0, eps, t)
        size = expected.abs().flatten(1).amax(1).clamp(min=1).reshape(-1, 1, 1, 1)
        assert ((other - expected) / size).abs().max() < 1e-6


def test_flow_and_v_are_defined_at_both_ends_of_the_straight_path_and_edm_everywhere():
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    x_0, eps = images_and_noise(2)
    for objective in (
        get_objective("flow"),
        get_objective("v", process="linear"),
        get_objective("edm", process="linear"),
    ):
        x_t = objective.process.add_noise(x_0, eps, t)
        image, noise = objective.denoised(x_t, objective.target_of(x_0, eps, t), t)
        torch.testing.assert_close(image, x_0, rtol=0, atol=1e-12)
        torch.testing.assert_close(noise, eps, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "target", "t"), [("eps", "x0", 1.0), ("eps", "v", 1.0), ("x0", "eps", 0.0), ("x0", "flow", 0.0)]
)
def test_what_a_prediction_does_not_determine_is_refused(source, target, t):
    """At SNR 0 the noise says nothing about the image, at SNR ∞ the image nothing about the noise."""
    x = torch.zeros(1, 1)
    with pytest.raises(InvalidValueError, match=rf"{target}.*{source}.*t = {t:g}.*linear"):
        convert(x, x, torch.tensor([t]), "linear", source, target)


# ------------------------------------------------------------------------------------------- against diffusers


@pytest.mark.parametrize("name", ["ddpm", "cosine", "sd"])
def test_x_t_and_v_equal_DDPMScheduler(name):
    process = get_process(name)
    scheduler = DDPMScheduler(trained_betas=process.betas().numpy(), prediction_type="v_prediction")
    x_0, eps = images_and_noise(5, dtype=torch.float32)
    n = torch.tensor([1, 2, 500, 900, 999])
    objective = get_objective("v", process=name)
    torch.testing.assert_close(
        process.add_noise(x_0, eps, n), scheduler.add_noise(x_0, eps, n - 1), rtol=1e-5, atol=1e-5
    )
    velocity = objective.target_of(x_0, eps, n)
    torch.testing.assert_close(velocity, scheduler.get_velocity(x_0, eps, n - 1), rtol=1e-5, atol=1e-5)
    for k in range(5):
        x_t = process.add_noise(x_0, eps, n)[k : k + 1]
        theirs = scheduler.step(velocity[k : k + 1], int(n[k]) - 1, x_t).pred_original_sample
        ours = objective.denoised(x_t, velocity[k : k + 1], n[k : k + 1]).x_0.clamp(-1, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("eps", "epsilon"), ("x0", "sample"), ("v", "v_prediction")])
def test_the_denoised_image_equals_DDIMScheduler_for_its_prediction_types(name, kind):
    objective = get_objective(name, process="ddpm")
    scheduler = DDIMScheduler(prediction_type=kind, clip_sample=False)
    x_t, output = images_and_noise(3, dtype=torch.float32)
    for n in (1, 300, 1000):
        theirs = scheduler.step(output, n - 1, x_t) if scheduler.set_timesteps(1000) is None else None
        ours = objective.denoised(x_t, output, torch.full((3,), float(n)))
        torch.testing.assert_close(ours.x_0, theirs.pred_original_sample, rtol=1e-4, atol=2e-4)


def test_the_straight_path_equals_FlowMatchEulerDiscreteScheduler():
    scheduler, objective = FlowMatchEulerDiscreteScheduler(), get_objective("flow")
    x_0, eps = images_and_noise(4, dtype=torch.float32)
    scheduler.set_timesteps(4)
    t = scheduler.timesteps / 1000
    x_t = objective.process.add_noise(x_0, eps, t)
    torch.testing.assert_close(x_t, scheduler.scale_noise(x_0, scheduler.timesteps, eps))
    torch.testing.assert_close(objective.process.network_time(t), scheduler.timesteps)
    torch.testing.assert_close(objective.target_of(x_0, eps, t), eps - x_0)


@pytest.mark.parametrize("sigma_data", [0.5, 0.85])
def test_preconditioning_equals_EDMEulerScheduler(sigma_data):
    scheduler = EDMEulerScheduler(sigma_data=sigma_data)
    objective = get_objective("edm", sigma_data=sigma_data)
    x, output = images_and_noise(1, dtype=torch.float32)
    for t in (0.0, 0.3, 0.7, 1.0):
        sigma = objective.process.sigma(t).float()
        at = torch.tensor([t])
        x_in, time = objective.network_inputs(sigma * x, at)
        torch.testing.assert_close(x_in, scheduler.precondition_inputs(sigma * x, sigma))
        image = objective.denoised(sigma * x, output, at).x_0
        torch.testing.assert_close(
            image, scheduler.precondition_outputs(sigma * x, output, sigma), rtol=1e-5, atol=1e-5
        )
        c_noise = scheduler.precondition_noise(sigma).item()
        assert c_noise == pytest.approx(sigma.log().item() / 4)
        low, high = (s.log().item() / 4 for s in (torch.tensor(0.002), torch.tensor(80.0)))
        assert time.item() == pytest.approx(1000 * (c_noise - low) / (high - low), abs=1e-2)


@pytest.mark.parametrize("settings", [{}, {"logit_mean": 0.5, "logit_std": 0.7}])
def test_logit_normal_times_equal_diffusers(settings):
    ours = get_objective("flow", times="logit-normal", **settings).training_times(UNIFORMS)
    theirs = compute_density_for_timestep_sampling(
        "logit_normal",
        100_000,
        settings.get("logit_mean", 0.0),
        settings.get("logit_std", 1.0),
        generator=torch.Generator().manual_seed(0),
    )
    levels = torch.linspace(0.01, 0.99, 25)
    torch.testing.assert_close(ours.quantile(levels), theirs.quantile(levels), rtol=0, atol=0.01)


@pytest.mark.parametrize("scale", [1.29, 0.5, -0.3])
def test_mode_times_equal_diffusers_number_by_number(scale):
    uniforms = torch.rand(1000, generator=torch.Generator().manual_seed(3))
    theirs = compute_density_for_timestep_sampling(
        "mode", 1000, mode_scale=scale, generator=torch.Generator().manual_seed(3)
    )
    ours = get_objective("flow", times="mode", mode_scale=scale).training_times(uniforms)
    torch.testing.assert_close(ours, theirs.clamp(1e-7, 1 - 1e-7), rtol=0, atol=1e-6)


def test_log_normal_times_have_edm_s_law_of_sigma_on_every_process():
    for process in ("edm", "vp", "linear"):
        objective = get_objective("edm", process=process)
        t = objective.training_times(UNIFORMS)
        log_sigma = -objective.process.lambda_(t)
        assert log_sigma.mean().item() == pytest.approx(-1.2, abs=0.01)
        assert log_sigma.std().item() == pytest.approx(1.2, abs=0.01)


@pytest.mark.parametrize("times", TIMES)
@every_process
def test_training_times_lie_inside_the_process(times, process):
    objective = get_objective("v", process=process, times=times)
    t = objective.training_times(torch.tensor([2.0**-24, 0.3, 1 - 2.0**-24]))
    assert t.dtype == torch.float32
    assert (t >= 0).all()
    assert (t <= objective.process.t_max).all()
    assert objective.process.continuous or torch.equal(t, t.round())


def test_min_snr_weights_equal_diffusers_recipe():
    scheduler, n = DDPMScheduler(), torch.arange(1, 1001)
    snr = compute_snr(scheduler, n - 1).double()
    base = snr.clamp(max=5.0)
    for name, divisor in (("eps", snr), ("x0", torch.ones_like(snr)), ("v", snr + 1)):
        weights = get_objective(name, process="ddpm", weight="min-snr").loss_weights(n)
        torch.testing.assert_close(weights, base / divisor, rtol=1e-3, atol=1e-6)


def test_soft_min_snr_and_edm_weights_are_their_formulas():
    objective = get_objective("edm")
    t = torch.linspace(0, 1, 50, dtype=torch.float64)
    sigma = objective.process.sigma(t)
    assert objective.loss_weights(t) is None  # EDM's λ(σ) is 1/c_out²
    for target, factor in (("x0", torch.ones_like(sigma)), ("eps", sigma**2)):
        one = Objective(objective.process, target=target, weight="edm")
        torch.testing.assert_close(
            one.loss_weights(t), factor * (sigma**2 + 0.25) / (sigma * 0.5) ** 2, rtol=1e-9, atol=0
        )
    soft = Objective(objective.process, target="x0", weight="soft-min-snr", snr_gamma=4.0)
    torch.testing.assert_close(soft.loss_weights(t), 1 / (sigma**2 + 0.25), rtol=1e-9, atol=0)


def test_the_sigmoid_weight_makes_the_loss_an_integral_over_the_log_snr():
    """Kingma & Gao: the weighted ε-loss does not depend on the process, for the same error at each log-SNR."""
    totals = []
    for process in ("vp", "linear"):
        objective = Objective(get_process(process), weight="sigmoid", bias=1.0)
        total, _ = quad(
            lambda t, o=objective: (
                float(o.loss_weights(torch.tensor(t, dtype=torch.float64)))
                * torch.sigmoid(2 * o.process.lambda_(t)).item()
            ),
            1e-5,
            1 - 1e-5,
            limit=400,
        )
        totals.append(total)
    assert totals[0] == pytest.approx(totals[1], rel=0.02)


@pytest.mark.parametrize("weight", WEIGHTS)
@every_process
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_finite_and_positive_at_training_times(weight, process, target):
    objective = Objective(get_process(process), target=target, weight=weight)
    t = objective.training_times(torch.tensor([1e-6, 0.01, 0.5, 0.99, 1 - 1e-6]))
    weights = objective.loss_weights(t)
    assert weights is None or (weights.isfinite().all() and (weights > 0).all())


# ------------------------------------------------------------------------------------------------- closed forms


@every_objective
def test_the_exact_prediction_has_the_smallest_loss_for_gaussian_data(name):
    """x_0 ~ N(μ, s²): E[F | x_t] is affine in x_t. Its loss is the conditional variance; any other slope loses more."""
    mean, std, objective = 0.4, 0.7, get_objective(name)
    t = objective.process.t_max * torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
    z, eps = torch.randn(2, 3, 40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    c = objective.coefficients(t)
    variance = (c.alpha * std) ** 2 + c.sigma**2
    slope, center = (c.alpha * c.p * std**2 + c.sigma * c.q) / variance, c.p * mean
    scale = objective.input_scale(t)

    def net(x, time, bend=0.0):
        x_t = x / scale[:, None]
        return center[:, None] + (slope + bend / variance.sqrt())[:, None] * (x_t - (c.alpha * mean)[:, None])

    x_0 = mean + std * z
    exact = simple_loss(net, objective, x_0, t, eps)
    smallest = (c.alpha * c.q - c.sigma * c.p).square() * std**2 / variance
    torch.testing.assert_close(exact, smallest, rtol=0.03, atol=0)
    for bend in (-0.1, 0.1):
        assert (simple_loss(lambda x, t, bend=bend: net(x, t, bend), objective, x_0, t, eps) > exact).all()


def test_edm_gives_targets_and_inputs_unit_variance():
    objective = get_objective("edm", sigma_data=0.7)
    x_0, eps = images_and_noise(4, shape=(40_000,))
    t = torch.tensor([0.0, 0.3, 0.6, 1.0], dtype=torch.float64)
    x_0 = 0.7 * x_0
    x, _ = objective.network_inputs(objective.process.add_noise(x_0, eps, t), t)
    torch.testing.assert_close(x.var(1), torch.ones(4).double(), rtol=0.03, atol=0)
    torch.testing.assert_close(objective.target_of(x_0, eps, t).var(1), torch.ones(4).double(), rtol=0.03, atol=0)


# ---------------------------------------------------------------------------------------------- names and errors


@every_objective
def test_an_objective_round_trips_through_json(name):
    objective = get_objective(name)
    assert objective.name == name
    assert get_objective(json.loads(json.dumps(objective.to_dict()))) == objective
    assert get_objective(objective) == objective


def test_a_process_means_noise_prediction_on_it():
    assert get_objective("sd") == get_objective("eps", process="sd") == get_objective(get_process("sd"))
    assert get_objective(Linear()).name == "eps"


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        ("flwo", {}, "did you mean 'flow'"),
        ("v", {"target": "w"}, "target"),
        ("v", {"times": "lognormal"}, "did you mean 'log-normal'"),
        ("v", {"weight": "minsnr"}, "did you mean 'min-snr'"),
        ("edm", {"target": "v"}, "target.*x0.*precondition.*'v'"),
        ("edm", {"sigma_data": 0.0}, "sigma_data.*> 0.*0.0"),
        ("edm", {"process": {"name": "edm", "sigma_min": 80.0, "sigma_max": 0.002}}, "sigma_min < sigma_max"),
        ("edm", {"process": {"name": "edm", "sigma_min": -1.0}}, "sigma_min"),
        ("edm", {"process": {"name": "edm", "rho": 0.0}}, "rho.*> 0"),
        ("edm", {"sigmas": 3}, "part of objective 'edm'"),
    ],
)
def test_invalid_objectives_are_refused_with_a_reason(spec, changes, message):
    with pytest.raises(InvalidValueError, match=message):
        get_objective(spec, **changes)


def test_preconditions_are_the_ones_that_exist():
    for name in PRECONDITIONS:
        assert Objective(get_process("vp"), target="x0", precondition=name).precondition == name
