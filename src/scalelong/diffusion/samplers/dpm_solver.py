"""DPM-Solver-fast (Lu et al., 2022): singlestep exponential integrators of order 3, uniform in log-SNR.

In λ = ln(α/σ), half the log-SNR, the probability-flow ODE is linear but for ε̂:
    x_t = (α_t/α_s)·x_s − α_t ∫ e^(−λ) ε̂ dλ   from λ_s to λ_t,
and a step of order k takes the Taylor terms of ε̂ below k from k evaluations inside the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, expm1

import numpy as np
from torch import Tensor

from scalelong.diffusion.samplers.contract import Callback, EpsFn, NoiseFn, State, times_of
from scalelong.process import Process


def singlestep_orders(evaluations: int) -> list[int]:
    """Orders of the steps that spend exactly `evaluations`: threes first, e.g. 50 = 16·3 + 2 (Lu et al., §3.4)."""
    thirds, rest = divmod(evaluations, 3)
    if rest == 0:
        return [3] * (thirds - 1) + [2, 1]
    return [3] * thirds + [rest]


def dpm_solver_fast(
    eps_fn: EpsFn, x_T: Tensor, process: Process, steps: int, noise: NoiseFn, callback: Callback | None = None
) -> Tensor:
    """From t_max to t_min with `steps` evaluations; `noise` is not used."""
    orders = singlestep_orders(steps)
    ends = float(process.lambda_(process.t_max)), float(process.lambda_(process.t_min))
    lambdas = np.linspace(*ends, len(orders) + 1).tolist()
    x = x_T
    for index, order in enumerate(orders):
        start = _Point.at(process, lambdas[index])
        eps = eps_fn(x, times_of(x, start.t))
        if callback is not None:
            callback(State(index, start.t, x, eps))
        x = _UPDATES[order](eps_fn, x, eps, process, start, lambdas[index + 1])
    return x


@dataclass(frozen=True)
class _Point:
    """A time with all that is known of it."""

    lambda_: float
    t: float
    log_alpha: float
    sigma: float

    @staticmethod
    @lru_cache(maxsize=4096)  # every batch meets the same points
    def at(process: Process, lambda_: float) -> _Point:
        t = float(process.inverse_lambda(lambda_))
        return _Point(lambda_, t, 0.5 * float(process.log_alpha_bar(t)), float(process.sigma(t)))


def _first(x: Tensor, eps: Tensor, start: _Point, end: _Point) -> Tensor:
    """(α_t/α_s)·x − σ_t(e^h − 1)·ε̂: exact if ε̂ were constant."""
    h = end.lambda_ - start.lambda_
    return exp(end.log_alpha - start.log_alpha) * x - (end.sigma * expm1(h)) * eps


def _order_1(eps_fn: EpsFn, x: Tensor, eps: Tensor, process: Process, start: _Point, end: float) -> Tensor:
    return _first(x, eps, start, _Point.at(process, end))


def _order_2(eps_fn: EpsFn, x: Tensor, eps: Tensor, process: Process, start: _Point, end: float) -> Tensor:
    """DPM-Solver-2: the whole step with the noise predicted half way (Algorithm 1)."""
    middle = _Point.at(process, start.lambda_ + 0.5 * (end - start.lambda_))
    u = _first(x, eps, start, middle)
    return _first(x, eps_fn(u, times_of(u, middle.t)), start, _Point.at(process, end))


def _order_3(eps_fn: EpsFn, x: Tensor, eps: Tensor, process: Process, start: _Point, end: float) -> Tensor:
    """DPM-Solver-3 with r_1 = 1/3, r_2 = 2/3 (Algorithm 2)."""
    h, r_1, r_2 = end - start.lambda_, 1.0 / 3.0, 2.0 / 3.0
    s_1 = _Point.at(process, start.lambda_ + r_1 * h)
    s_2 = _Point.at(process, start.lambda_ + r_2 * h)
    t = _Point.at(process, end)
    u_1 = _first(x, eps, start, s_1)
    d_1 = eps_fn(u_1, times_of(u_1, s_1.t)) - eps
    u_2 = _first(x, eps, start, s_2) - (s_2.sigma * r_2 / r_1 * (expm1(r_2 * h) / (r_2 * h) - 1.0)) * d_1
    d_2 = eps_fn(u_2, times_of(u_2, s_2.t)) - eps
    return _first(x, eps, start, t) - (t.sigma / r_2 * (expm1(h) / h - 1.0)) * d_2


_UPDATES = {1: _order_1, 2: _order_2, 3: _order_3}
