"""Samplers by name, one contract for all (`contract.Sampler`)."""

from __future__ import annotations

from scalelong.diffusion.samplers.contract import Callback, EpsFn, NoiseFn, Sampler, State
from scalelong.diffusion.samplers.dpm_solver import dpm_solver_fast
from scalelong.diffusion.samplers.euler import euler_maruyama, euler_ode
from scalelong.diffusion.samplers.schedulers import GRID, ddim, ddpm, dpm_solver_plus_plus
from scalelong.errors import unknown

SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Sampler(
            "euler-maruyama",
            "the reverse SDE by Euler–Maruyama (the paper's CIFAR-10 and CelebA)",
            euler_maruyama,
            default_steps=1000,
            stochastic=True,
            continuous_only=True,
        ),
        Sampler(
            "euler-ode",
            "the probability-flow ODE by Euler",
            euler_ode,
            default_steps=1000,
            stochastic=False,
            continuous_only=True,
        ),
        Sampler(
            "dpm-solver-fast",
            "DPM-Solver-fast, singlestep of order 3 (the paper's ImageNet 64)",
            dpm_solver_fast,
            default_steps=50,
            stochastic=False,
        ),
        Sampler(
            "ddpm",
            "DDPM's ancestral sampling",
            ddpm,
            default_steps=1000,
            stochastic=True,
            max_steps=GRID,
        ),
        Sampler("ddim", "DDIM", ddim, default_steps=50, stochastic=False, max_steps=GRID),
        Sampler(
            "dpm-solver++",
            "DPM-Solver++(2M) (the paper's COCO)",
            dpm_solver_plus_plus,
            default_steps=50,
            stochastic=False,
            max_steps=GRID,
        ),
    )
}


def get_sampler(name: str | Sampler) -> Sampler:
    """A sampler by its name."""
    if isinstance(name, Sampler):
        return name
    if name not in SAMPLERS:
        raise unknown("sampler", name, SAMPLERS)
    return SAMPLERS[name]


__all__ = ["SAMPLERS", "Callback", "EpsFn", "NoiseFn", "Sampler", "State", "get_sampler"]
