"""diffusers' schedulers behind our contract: DDPM, DDIM and DPM-Solver++.

All three are settings of diffusers' DPMSolverMultistepScheduler, which takes the noise as an argument
(DDPMScheduler draws its own, which would tie an image to its batch) and steps between any two times
(DDIMScheduler steps by 1000 // N even where N does not divide 1000):
    DDPM          sde-dpmsolver++ of order 1: exactly DDPM's posterior, with its smaller variance
    DDIM          dpmsolver++ of order 1: exactly DDIM with η = 0
    DPM-Solver++  dpmsolver++ of order 2, multistep (2M)
The grid has 1000 steps; N of them are used, evenly spaced from the last ("trailing"), and the end is t = 0.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from torch import Tensor

from scalelong.diffusion.process import Process
from scalelong.diffusion.samplers.contract import Callback, EpsFn, NoiseFn, State, times_of
from scalelong.errors import require

GRID = 1000


def ddpm(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """Ancestral sampling (Ho et al., 2020)."""
    scheduler = _scheduler(process, steps, algorithm_type="sde-dpmsolver++", solver_order=1)
    return _run(scheduler, eps_fn, x_T, process, noise, callback)


def ddim(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """DDIM with η = 0 (Song et al., 2021); `noise` is not used."""
    return _run(_scheduler(process, steps, solver_order=1), eps_fn, x_T, process, None, callback)


def dpm_solver_plus_plus(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """DPM-Solver++(2M) (Lu et al., 2022); `noise` is not used."""
    return _run(_scheduler(process, steps, solver_order=2), eps_fn, x_T, process, None, callback)


def trailing(steps: int) -> list[int]:
    """Indices 999 … of the grid, evenly spaced by 1000/steps."""
    return (np.linspace(GRID, 0, steps + 1)[:-1].round().astype(int) - 1).tolist()


def _scheduler(process: Process, steps: int, **settings: Any) -> Any:
    diffusers = require("diffusers", "train", "this sampler")
    scheduler = diffusers.DPMSolverMultistepScheduler(trained_betas=process.betas(GRID).numpy(), **settings)
    with warnings.catch_warnings():  # diffusers calls np.array on a tensor, of which NumPy 2 complains
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        scheduler.set_timesteps(timesteps=trailing(steps))
    return scheduler


def _run(
    scheduler: Any, eps_fn: EpsFn, x_T: Tensor, process: Process, noise: NoiseFn | None, callback: Callback | None
) -> Tensor:
    times = process.grid(GRID)
    x = x_T
    for index, step in enumerate(scheduler.timesteps):
        t = float(times[step])
        eps = eps_fn(x, times_of(x, t))
        if callback is not None:
            callback(State(index, t, x, eps))
        drawn = None if noise is None else noise(index)
        x = scheduler.step(eps, step, x, variance_noise=drawn, return_dict=False)[0]
    return x
