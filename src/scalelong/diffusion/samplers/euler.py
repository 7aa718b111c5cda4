"""Euler's method for the reverse SDE (Euler–Maruyama) and for the probability-flow ODE of the VP process.

With the score −ε̂/σ(t) (Song et al., 2021), backwards in time:
    dx = −½β·x dt + β·ε̂/σ dt + √β dw̄   (SDE)
    dx = −½β·x dt + ½β·ε̂/σ dt          (ODE)
on the times {0} ∪ linspace(1e-3, 1, N), as the paper's pixel-space results; the last step, to 0, adds no noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from torch import Tensor

from scalelong.diffusion.samplers.contract import Callback, EpsFn, NoiseFn, State, times_of
from scalelong.process import VPSDE, Process

LAST_TIME = 1e-3  # the time before 0


def euler_grid(steps: int) -> list[float]:
    """steps + 1 times from 1 down to 0."""
    return [*np.linspace(1.0, LAST_TIME, steps).tolist(), 0.0]


def euler_maruyama(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """The reverse SDE; steps evaluations."""
    return _euler(eps_fn, x_T, process, steps, noise, callback)


def euler_ode(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """The probability-flow ODE; steps evaluations; `noise` is not used."""
    return _euler(eps_fn, x_T, process, steps, None, callback)


def _euler(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn | None, callback: Callback | None
) -> Tensor:
    assert isinstance(process, VPSDE)  # Sampler.check has seen to it
    x = x_T
    for index, step in enumerate(_plan(process, steps, noise is not None)):
        eps = eps_fn(x, times_of(x, step.t))
        if callback is not None:
            callback(State(index, step.t, x, eps))
        x = step.keep * x - step.drift * eps
        if noise is not None and step.noise:
            x = x + step.noise * noise(index)
    return x


@dataclass(frozen=True)
class _Step:
    """x ← keep·x − drift·ε̂ + noise·N(0, I), from t."""

    t: float
    keep: float
    drift: float
    noise: float


@lru_cache(maxsize=8)
def _plan(process: VPSDE, steps: int, stochastic: bool) -> list[_Step]:
    share = 1.0 if stochastic else 0.5  # of β·ε̂/σ in the drift
    plan = []
    for t, t_next in pairwise(euler_grid(steps)):
        noise_rate, dt = float(process.beta(t)), t - t_next
        drift = share * noise_rate * dt / float(process.sigma(t))
        noise = (noise_rate * dt) ** 0.5 if stochastic and t_next > 0.0 else 0.0
        plan.append(_Step(t, 1.0 + 0.5 * noise_rate * dt, drift, noise))
    return plan
