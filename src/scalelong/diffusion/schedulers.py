"""diffusers' schedulers for every objective: as samplers by name, and in the pipeline.

A scheduler sees the prediction that it was made for, converted from x̂_0 and ε̂, and the network sees x at the time at
which its own interpolant has the scheduler's signal-to-noise ratio.

| schedulers | serve | receive |
|---|---|---|
| NOISE: steps of a variance-preserving x | every objective; x is rescaled | ε̂ |
| FLOW: steps along the straight path | process "linear" | ε̂ − x̂_0 |
| EDM: steps of x_0 + σ·ε | process "edm" | (x̂_0 − c_skip·x)/c_out |
"""

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.samplers import SAMPLERS, NoiseFn, PredictFn, Sampler, both
from scalelong.errors import InvalidValueError, invalid, require, unknown
from scalelong.objective import Denoised, Objective
from scalelong.process import INTERPOLANTS, Interpolant, Linear, Process

# Tests compare each with a closed form.
NOISE = (
    "DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler",
    "HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LMSDiscreteScheduler",
    "PNDMScheduler", "UniPCMultistepScheduler",
)  # fmt: skip
FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
EDM = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")
SCHEDULERS = (*NOISE, *FLOW, *EDM)
OTHERS = "others sample from distilled networks, invert images, or fix a noise schedule of their own"
GRID = 1000  # training steps of a scheduler


def scheduler_settings(process: Interpolant) -> dict[str, Any]:
    """Arguments of one of `NOISE` for this process."""
    return {"trained_betas": process.betas(GRID).tolist(), "timestep_spacing": "trailing"}


def set_timesteps(scheduler: Any, process: Interpolant, steps: int, device: torch.device) -> Tensor:
    """Set the scheduler's timesteps. Returns the process's time of each: where the signal-to-noise ratios agree."""
    check_scheduler(scheduler, process)
    with warnings.catch_warnings():  # diffusers calls np.array on a tensor, which NumPy 2 deprecates
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler.set_timesteps(steps, device=device)
    at = scheduler.timesteps.double().cpu()
    if _family(scheduler) is FLOW:
        lambda_ = -torch.logit(at / scheduler.config.num_train_timesteps)
    elif _family(scheduler) is EDM:
        lambda_ = -4 * at  # timesteps are c_noise = ln σ/4
    else:
        alpha_bar = scheduler.alphas_cumprod.double().cpu()
        lambdas = 0.5 * (alpha_bar.log() - (1 - alpha_bar).log())  # λ of every training step
        at = at.clamp(0, len(lambdas) - 1)  # fractional for schedulers in σ
        below = at.floor().long().clamp(max=len(lambdas) - 2)
        lambda_ = torch.lerp(lambdas[below], lambdas[below + 1], at - below)
    least, first = float(process.lambda_(process.t_max)), float(lambda_.min())
    if first < least - 0.1:
        hint = "use from_config(pipe.scheduler.config), without rescale_betas_zero_snr"
        expected = f">= {least:.2f}, where process {process.name!r} ends"
        raise invalid("the scheduler's first ln(α/σ)", expected, f"{first:.2f}", hint)
    return process.inverse_lambda(lambda_).clamp(process.t_min, process.t_max).float().to(device)


def advance(
    scheduler: Any, predict: PredictFn, process: Interpolant, x: Tensor, step: Tensor, t: Tensor, generator: Any = None
) -> Tensor:
    """One step of a scheduler: x (B, …) at its timestep `step`, which is the process's time `t`."""
    times, scaled = t.expand(len(x)), x
    if hasattr(scheduler, "scale_model_input"):
        scaled = scheduler.scale_model_input(x, step)
    if _family(scheduler) is NOISE:
        predicted = predict(scaled if isinstance(process, Process) else scaled * float(process.norm(t)), times)
        output = predicted.eps if isinstance(predicted, Denoised) else predicted
    else:
        x_0, eps = both(predict(x, times), x, times, process)
        output = eps - x_0
        if _family(scheduler) is EDM:
            sigma, sigma_data = float((4 * step.double()).exp()), scheduler.config.sigma_data
            norm = (sigma**2 + sigma_data**2) ** 0.5
            output = (x_0 - (sigma_data / norm) ** 2 * x) * (norm / (sigma * sigma_data))
    noisy = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    stepped: Tensor = scheduler.step(output, step, x, **noisy).prev_sample
    return stepped


def check_scheduler(scheduler: Any, process: Interpolant, latents: bool = False) -> None:
    """Raise `InvalidValueError` with the reason if this scheduler cannot sample from a network of this process."""
    config, kind = scheduler.config, type(scheduler)
    family = _family(scheduler)
    if family is None:
        raise invalid("scheduler", f"one of {', '.join(SCHEDULERS)}", kind.__name__, OTHERS)
    _check_process(kind.__name__, family, process)
    required = {
        "prediction_type": ("epsilon",),
        "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", None),
        "timestep_type": ("discrete",),
        "use_flow_sigmas": (False, None),
        "invert_sigmas": (False, None),
        "stochastic_sampling": (False, None),
        "clip_sample": (False, None) if latents else (True, False, None),
    }
    for name, allowed in required.items():
        if name in config and config[name] not in allowed:
            raise invalid(f"{kind.__name__}'s {name}", f"{allowed[0]!r} for this network", config[name])


def _check_process(name: str, family: tuple[str, ...], process: Interpolant) -> None:
    path = {FLOW: ("linear", "x_t = (1 − t)·x_0 + t·ε"), EDM: ("edm", "x_t = x_0 + σ·ε")}
    if family in path and process.name != path[family][0]:
        expected, formula = path[family]
        hint = f"it steps along {formula}; use {NOISE[3]} or another scheduler for noise prediction"
        raise invalid(f"the process of {name}", repr(expected), process.name, hint)


def _family(scheduler: Any) -> tuple[str, ...] | None:
    bases = {base.__name__ for base in type(scheduler).__mro__}
    return next((family for family in (NOISE, FLOW, EDM) if bases & set(family)), None)


# ------------------------------------------------------------------------------------ schedulers as samplers


@dataclass(frozen=True)
class SchedulerSampler(Sampler):
    """A scheduler of diffusers as a sampler: the most steps whose network evaluations stay within the budget."""

    def check(self, process: Interpolant | Objective, steps: int | None = None) -> int:
        chosen = process.process if isinstance(process, Objective) else process
        _check_process(self.name, next(family for family in (NOISE, FLOW, EDM) if self.name in family), chosen)
        return self.evaluations(steps)

    def evaluations(self, steps: int | None = None) -> int:
        budget = self.default_steps if steps is None else steps
        return _steps_within(self.name, budget)[1]


def scheduler_sampler(name: str) -> SchedulerSampler:
    """Return the sampler that runs a scheduler of diffusers."""
    diffusers = require("diffusers", "train", f"sampler {name!r}")
    if name == "DPMSolverSDEScheduler":
        raise invalid("sampler", "a scheduler whose noise is drawn per image", name, "use it in a pipeline")
    if name in SCHEDULERS:
        return SchedulerSampler(name, _Run(name), 50, stochastic=True)
    if name.endswith("Scheduler") and hasattr(diffusers, name):
        raise invalid("sampler", f"{', '.join(SAMPLERS)} or one of {', '.join(SCHEDULERS)}", name, OTHERS)
    raise unknown("sampler", name, (*SAMPLERS, *SCHEDULERS))


@dataclass(frozen=True)
class _Run:
    name: str

    def __call__(self, predict: PredictFn, x: Tensor, process: Interpolant, steps: int, noise: NoiseFn) -> Tensor:
        scheduler = _build(self.name, process)
        times = set_timesteps(scheduler, process, _steps_within(self.name, steps)[0], x.device)
        generators = list(_generators(noise(0))) if _draws(scheduler) else None
        x = x * (scheduler_scale(scheduler) / process.prior_std)
        for step, t in zip(scheduler.timesteps, times, strict=True):
            x = advance(scheduler, predict, process, x, step, t, generators)
        return x


def scheduler_scale(scheduler: Any) -> float:
    """Standard deviation of the noise that a scheduler starts from; those of flow matching do not say it: 1."""
    return float(getattr(scheduler, "init_noise_sigma", 1.0))


def _draws(scheduler: Any) -> bool:
    return "generator" in inspect.signature(scheduler.step).parameters


def _generators(noise: Tensor) -> Iterable[torch.Generator]:
    """A generator per image, seeded by the image's own noise: diffusers draws from generators."""
    for bits in noise.float().flatten(1)[:, 0].contiguous().cpu().view(torch.int32).tolist():
        yield torch.Generator(noise.device).manual_seed(bits & 0x7FFFFFFF)


def _build(name: str, process: Interpolant) -> Any:
    import diffusers

    if name in FLOW:
        return getattr(diffusers, name)()
    if name in EDM:
        settings = process.to_dict()
        del settings["name"]  # the rest is σ_min, σ_max and ρ
        return getattr(diffusers, name)(**settings)
    # Clipping is `clip_denoised`'s; PNDM's Runge–Kutta steps would cost 9 further evaluations.
    settings = {**scheduler_settings(process), "clip_sample": False, "skip_prk_steps": True}
    try:
        return getattr(diffusers, name).from_config(settings)
    except ImportError as error:
        raise InvalidValueError(f"sampler {name!r} is not available: {str(error).strip().splitlines()[0]}") from None


@lru_cache(maxsize=64)
def _steps_within(name: str, budget: int) -> tuple[int, int]:
    """The largest argument of `set_timesteps` whose evaluations stay within the budget, and their number."""
    process = INTERPOLANTS["edm"]() if name in EDM else Linear()
    scheduler, device = _build(name, process), torch.device("cpu")
    for steps in range(min(budget, GRID), 0, -1):
        evaluations = len(set_timesteps(scheduler, process, steps, device))
        if evaluations <= budget:
            return steps, evaluations
    raise invalid(f"steps of sampler {name!r}", "enough for its first step, 2 or more", budget)
