"""Samplers against the equivalent diffusers schedulers, on a network that is not affine."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, DPMSolverSinglestepScheduler

from scalelong.diffusion import clip_denoised, get_process, get_sampler
from scalelong.diffusion.samplers import singlestep_orders

NAMED = {  # diffusers' own schedule names, so that the betas are theirs
    "ddpm": {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02},
    "sd": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}
X_T = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))

discrete = pytest.mark.parametrize("name", NAMED)
# diffusers calls np.array on a tensor, which NumPy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def network(process):
    """An ε̂ of x and diffusers' step 0 … 999 that keeps the scale of images and mixes neighbours."""

    def eps(x, step):
        t = (torch.as_tensor(step, dtype=torch.float64).reshape(-1, 1, 1, 1) + 1) * (process.t_max / 1000)
        alpha, sigma = process.alpha(t).to(x), process.sigma(t).to(x)
        return sigma * x - 0.5 * alpha * torch.sin(2 * x + x.roll(1, -1) - x.roll(1, 1))

    return eps


def ours(sampler, name, steps, noise=None, make=network, clip=False):
    process = get_process(name)
    net, grid = make(process), process.t_max / 1000  # diffusers' step k is time (k + 1)·grid
    eps_fn = lambda x, t: net(x, t / grid - 1)
    return get_sampler(sampler)(clip_denoised(eps_fn, process) if clip else eps_fn, X_T, process, steps, noise)


def theirs(scheduler, name, steps, make=network, **arguments):
    net = make(get_process(name))
    scheduler.set_timesteps(steps)
    x = X_T
    for step in scheduler.timesteps:
        if step == scheduler.timesteps[-1] and scheduler.config.get("variance_type") == "fixed_large":
            scheduler.register_to_config(variance_type="fixed_small")  # theirs adds noise to the final image
        x = scheduler.step(net(x, step), step, x, **arguments).prev_sample
    return x


@discrete
@pytest.mark.parametrize("steps", [1, 2, 10, 50, 1000])
def test_ddim_equals_DDIMScheduler(name, steps):
    scheduler = DDIMScheduler(**NAMED[name], clip_sample=False, timestep_spacing="trailing")
    torch.testing.assert_close(ours("ddim", name, steps), theirs(scheduler, name, steps), rtol=1e-4, atol=1e-4)


@discrete
@pytest.mark.parametrize("steps", [1, 2, 10, 50, 1000])
@pytest.mark.parametrize(("sampler", "variance"), [("ddpm", "fixed_small"), ("ddpm-large", "fixed_large")])
def test_ddpm_equals_DDPMScheduler_given_the_same_noise(name, steps, sampler, variance):
    settings = {"clip_sample": False, "timestep_spacing": "trailing", "variance_type": variance}
    scheduler = DDPMScheduler(**NAMED[name], **settings)
    expected = theirs(scheduler, name, steps, generator=torch.Generator().manual_seed(7))
    replay = torch.Generator().manual_seed(7)
    x = ours(sampler, name, steps, lambda k: torch.randn(X_T.shape, generator=replay))
    torch.testing.assert_close(x, expected, rtol=2e-4, atol=2e-4)


def loud(process):
    """Predicts images far outside [−1, 1], so that clipping matters at every step."""
    inner = network(process)
    return lambda x, step: 0.3 * inner(x, step)


@discrete
@pytest.mark.parametrize("steps", [1, 10, 50, 1000])
def test_clipped_ddpm_equals_DDPMScheduler_with_clip_sample(name, steps):
    scheduler = DDPMScheduler(**NAMED[name], clip_sample=True, timestep_spacing="trailing")
    expected = theirs(scheduler, name, steps, loud, generator=torch.Generator().manual_seed(7))
    replay = torch.Generator().manual_seed(7)
    x = ours("ddpm", name, steps, lambda k: torch.randn(X_T.shape, generator=replay), loud, clip=True)
    torch.testing.assert_close(x, expected, rtol=2e-4, atol=2e-4)
    replay = torch.Generator().manual_seed(7)
    unclipped = ours("ddpm", name, steps, lambda k: torch.randn(X_T.shape, generator=replay), loud)
    assert (unclipped - expected).abs().max() > 0.5


@discrete
@pytest.mark.parametrize("steps", [1, 10, 50])
def test_clipped_ddim_equals_DDIMScheduler_with_clip_sample(name, steps):
    scheduler = DDIMScheduler(**NAMED[name], clip_sample=True, timestep_spacing="trailing")
    expected = theirs(scheduler, name, steps, loud, use_clipped_model_output=True)
    torch.testing.assert_close(ours("ddim", name, steps, make=loud, clip=True), expected, rtol=1e-4, atol=1e-4)
    assert (ours("ddim", name, steps, make=loud) - expected).abs().max() > 0.5


@discrete
@pytest.mark.parametrize("steps", [1, 2, 10, 20, 50])
def test_dpm_solver_plus_plus_equals_DPMSolverMultistepScheduler(name, steps):
    scheduler = DPMSolverMultistepScheduler(**NAMED[name], timestep_spacing="trailing")
    # Their tables are float32, and one step from t = 1000 divides by an α of 0.006: 2e-5 there.
    tolerance = 1e-4 if steps == 1 else 1e-5
    result, expected = ours("dpm-solver++", name, steps), theirs(scheduler, name, steps)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def thirds_in_lambda(process, orders):
    """Steps uniform in λ, their inner points at halves or thirds."""
    first, last = (float(process.lambda_(t)) for t in (process.t_max, process.t_min))
    ends = torch.linspace(first, last, len(orders) + 1).double()
    points = [
        ends[i] + (ends[i + 1] - ends[i]) * part / order for i, order in enumerate(orders) for part in range(order)
    ]
    return torch.stack([*points, ends[-1]])


def uniform_in_time(process, orders):
    return process.lambda_(torch.linspace(process.t_max, process.t_min, sum(orders) + 1, dtype=torch.float64))


@pytest.mark.parametrize("name", ["vp", *NAMED])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 50])
@pytest.mark.parametrize(
    ("sampler", "algorithm", "points"),
    [
        ("dpm-solver-fast", "dpmsolver", thirds_in_lambda),
        ("dpm-solver++3s", "dpmsolver++", uniform_in_time),
    ],
)
@pytest.mark.filterwarnings("ignore:.*dpmsolver:FutureWarning")
def test_singlestep_solvers_equal_DPMSolverSinglestepScheduler_on_the_same_points(
    name, steps, sampler, algorithm, points
):
    # Their order list equals ours (3 … 3 and the rest). Their grid is set to our λ.
    # The second inner point of a step of order 3 is the update they call "heun", its end the one they call "midpoint".
    process, orders = get_process(name), singlestep_orders(steps)
    lambdas = points(process, orders)
    scheduler = DPMSolverSinglestepScheduler(
        trained_betas=process.betas().numpy(),
        algorithm_type=algorithm,
        solver_order=3,
        lower_order_final=True,
        final_sigmas_type="sigma_min",
    )
    scheduler.set_timesteps(steps)
    assert scheduler.order_list == [part + 1 for order in orders for part in range(order)]
    scheduler.sigmas = (-lambdas).exp()
    net, grid = network(process), process.t_max / 1000
    x = X_T.double()
    for index, order in enumerate(scheduler.order_list):
        inside_a_three = order == 2 and index + 1 < steps and scheduler.order_list[index + 1] == 3
        scheduler.register_to_config(solver_type="heun" if inside_a_three else "midpoint")
        step = process.inverse_lambda(lambdas[index]) / grid - 1
        x = scheduler.step(net(x, step), scheduler.timesteps[index], x).prev_sample
    result = get_sampler(sampler)(lambda x, t: net(x, t / grid - 1), X_T.double(), process, steps)
    torch.testing.assert_close(result, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [300, 600])
def test_steps_that_do_not_divide_1000_stay_on_the_flow(steps):
    # DDIMScheduler steps by 1000 // N while its grid moves by 1000/N; ours steps between the grid's own times.
    exact = ours("dpm-solver-fast", "ddpm", 200)
    scheduler = DDIMScheduler(**NAMED["ddpm"], clip_sample=False, timestep_spacing="trailing")
    error = (ours("ddim", "ddpm", steps) - exact).abs().mean()
    their_error = (theirs(scheduler, "ddpm", steps) - exact).abs().mean()
    assert error < 0.02
    assert error < 0.3 * their_error
