"""DDPM, DDIM and DPM-Solver++ on a grid of 1000 steps, the numbers of each step worked out before the first.

All three are one update in the predicted image x̂ = (x − σ_s·ε̂)/α_s, from the time s to the next, t, with λ = ln(α/σ)
and h = λ_t − λ_s:
    DDIM, η = 0        x ← (σ_t/σ_s)·x + α_t(1 − e^(−h))·x̂
    DPM-Solver++(2M)   the same with x̂ + (h/2h')·(x̂ − x̂') for x̂, where x̂' and h' are those of the step before
    DDPM               x ← (σ_t/σ_s)e^(−h)·x + α_t(1 − e^(−2h))·x̂ + σ_t√(1 − e^(−2h))·noise, its smaller variance
N times are used, evenly spaced from the last ("trailing"); the end is t = 0, where x is x̂. They are diffusers'
DPMSolverMultistepScheduler of order 1 and 2 (tests hold them together) without its work at every step, and step between
any two times (DDIMScheduler steps by 1000 // N even where N does not divide 1000).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, expm1, inf

import numpy as np
import torch
from torch import Tensor

from scalelong.diffusion.samplers.contract import Callback, EpsFn, NoiseFn, State, times_of
from scalelong.process import Process

GRID = 1000


def ddpm(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """Ancestral sampling (Ho et al., 2020)."""
    return _run("ddpm", eps_fn, x_T, process, steps, noise, callback)


def ddim(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """DDIM with η = 0 (Song et al., 2021); `noise` is not used."""
    return _run("ddim", eps_fn, x_T, process, steps, noise, callback)


def dpm_solver_plus_plus(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al., 2022); `noise` is not used."""
    return _run("dpm-solver++", eps_fn, x_T, process, steps, noise, callback)


def trailing(steps: int) -> list[int]:
    """Indices 999 … of the grid, evenly spaced by 1000/steps."""
    return (np.linspace(GRID, 0, steps + 1)[:-1].round().astype(int) - 1).tolist()


@dataclass(frozen=True)
class _Step:
    """x ← keep·x + image·x̂ + before·x̂' + noise·N(0, I), where x̂ = (x − sigma·ε̂)/alpha."""

    t: float
    alpha: float
    sigma: float
    keep: float
    image: float
    before: float = 0.0
    noise: float = 0.0


@lru_cache(maxsize=16)
def _plan(kind: str, process: Process, steps: int) -> list[_Step]:
    """The numbers of every step, in float64."""
    times = process.grid(GRID)[trailing(steps)]
    alphas, sigmas = [*process.alpha(times).tolist(), 1.0], [*process.sigma(times).tolist(), 0.0]
    lambdas = [*process.lambda_(times).tolist(), inf]
    plan: list[_Step] = []
    for k, (s, t) in enumerate(pairwise(range(steps + 1))):
        h, last = lambdas[t] - lambdas[s], t == steps
        ratio = sigmas[t] / sigmas[s]
        now = float(times[k]), alphas[s], sigmas[s]
        if kind == "ddpm":
            image = -alphas[t] * expm1(-2 * h)
            plan.append(_Step(*now, ratio * exp(-h), image, noise=sigmas[t] * (-expm1(-2 * h)) ** 0.5))
            continue
        image = -alphas[t] * expm1(-h)
        # x̂' needs a step before; the step to t = 0, whose h is infinite, is of order 1
        r = 0.0 if kind == "ddim" or k == 0 or last else 0.5 * h / (lambdas[s] - lambdas[s - 1])
        plan.append(_Step(*now, ratio, image * (1 + r), before=-image * r))
    return plan


def _run(
    kind: str,
    eps_fn: EpsFn,
    x_T: Tensor,
    process: Process,
    steps: int,
    noise: NoiseFn,
    callback: Callback | None,
) -> Tensor:
    x, before = x_T, None
    for index, step in enumerate(_plan(kind, process, steps)):
        eps = eps_fn(x, times_of(x, step.t))
        if callback is not None:
            callback(State(index, step.t, x, eps))
        image = torch.sub(x, eps, alpha=step.sigma).div_(step.alpha)
        x = (step.keep * x).add_(image, alpha=step.image)
        if before is not None and step.before:
            x.add_(before, alpha=step.before)
        if step.noise:
            x.add_(noise(index), alpha=step.noise)
        before = image
    return x
