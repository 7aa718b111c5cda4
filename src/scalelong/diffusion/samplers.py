"""Samplers by name, behind one contract: `x_0 = sampler(predict, x_T, process, steps, noise)`.

| name | method | in the paper |
|---|---|---|
| euler-maruyama | reverse SDE, Euler–Maruyama | CIFAR-10, CelebA |
| euler-ode | probability-flow ODE, Euler | |
| dpm-solver-fast | DPM-Solver, singlestep of order 3 | ImageNet 64 |
| ddpm | ancestral sampling, smaller variance ("fixedsmall") | |
| ddpm-large | ancestral sampling, variance β ("fixedlarge") | CIFAR-10 with DDPM's U-Net |
| ddim | DDIM with η = 0 | |
| dpm-solver++ | DPM-Solver++(2M) | |
| dpm-solver++3s | DPM-Solver++, singlestep of order 3, uniform in time | COCO |

They use x̂_0 and ε̂ only, so they serve every objective and, the first two aside, every interpolant. On `linear` ddim is
Euler's method for flow matching, on `edm` Karras et al.'s. `get_sampler` also takes the name of a diffusers scheduler.
A step is one network evaluation in every sampler, so that budgets compare.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import exp, expm1, inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import invalid
from scalelong.objective import Denoised, Objective
from scalelong.process import VPSDE, Interpolant

PredictFn = Callable[[Tensor, Tensor], Tensor | Denoised]
"""x (B, …), t (B,) in the process's own time → ε̂ (B, …), or `Denoised`: x̂_0 and ε̂."""

NoiseFn = Callable[[int], Tensor]
"""The k-th draw of N(0, I) for this batch, (B, …): a function of k and the image indices, not of a random stream."""


@dataclass(frozen=True)
class Sampler:
    """A sampler and what the caller must know before running it."""

    name: str
    function: Callable[..., Tensor]  # (predict, x_T, process, steps, noise)
    default_steps: int
    stochastic: bool = False  # uses `noise`; the others are functions of x_T alone
    continuous_only: bool = False  # needs β(t) at every t: process "vp" alone
    max_steps: int | None = None

    def __call__(
        self, predict: PredictFn, x_T: Tensor, process: Interpolant, steps: int | None = None,
        noise: NoiseFn | None = None,
    ) -> Tensor:  # fmt: skip
        """Map x_T ~ N(0, prior_std²·I), (B, …), to images. Stochastic samplers need `noise`."""
        steps = self.check(process, steps)
        if self.stochastic and noise is None:
            raise invalid("noise", "a function k → (B, …)", None, f"sampler {self.name!r} is stochastic")
        return self.function(predict, x_T, process, steps, noise)

    def check(self, process: Interpolant | Objective, steps: int | None = None) -> int:
        """Return `evaluations(steps)`, or raise `InvalidValueError` if this sampler cannot run them on this process."""
        steps = self.evaluations(steps)
        process = process.process if isinstance(process, Objective) else process
        if self.continuous_only and not isinstance(process, VPSDE):
            others = ", ".join(name for name, sampler in SAMPLERS.items() if not sampler.continuous_only)
            expected = f"'vp', whose β(t) it needs, for sampler {self.name!r}"
            raise invalid("the process", expected, process.name, f"or use one of {others}")
        if steps < 1 or (self.max_steps is not None and steps > self.max_steps):
            expected = "an integer >= 1" if self.max_steps is None else f"an integer in 1 … {self.max_steps}"
            raise invalid(f"steps of sampler {self.name!r}", expected, steps)
        return steps

    def evaluations(self, steps: int | None = None) -> int:
        """Network evaluations per image. Guidance other than 0 or 1 doubles the batch of each, not their number."""
        return self.default_steps if steps is None else steps


def get_sampler(name: str | Sampler) -> Sampler:
    """Return a sampler by name."""
    if isinstance(name, Sampler):
        return name
    if name in SAMPLERS:
        return SAMPLERS[name]
    from scalelong.diffusion.schedulers import scheduler_sampler

    return scheduler_sampler(name)


def both(predicted: Tensor | Denoised, x: Tensor, t: Tensor, process: Interpolant) -> Denoised:
    """Complete a prediction of ε̂ by the x̂_0 that it implies."""
    if isinstance(predicted, Denoised):
        return predicted
    return Denoised(process.predict_x_0(x, predicted, t), predicted)


def _noise_of(predicted: Tensor | Denoised) -> Tensor:
    return predicted.eps if isinstance(predicted, Denoised) else predicted


def _times(x: Tensor, t: float) -> Tensor:
    """(B,): time t for every image of x."""
    return torch.full((x.shape[0],), t, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


# ----------------------------------------------------------------------- Euler, for the VP process
# With the score −ε̂/σ(t) (Song et al., 2021), backwards in time:
#     dx = −½β·x dt + β·ε̂/σ dt + √β dw̄   (SDE)
#     dx = −½β·x dt + ½β·ε̂/σ dt          (ODE)


def euler_grid(steps: int) -> list[float]:
    """Times 1 … 0, steps + 1 of them: {0} ∪ linspace(1e-3, 1, N), as in the paper's pixel-space results."""
    return [*np.linspace(1.0, 1e-3, steps).tolist(), 0.0]


@lru_cache(maxsize=8)
def _euler_steps(process: VPSDE, steps: int, stochastic: bool) -> list[tuple[float, float, float, float]]:
    """(t, keep, drift, size) of x ← keep·x − drift·ε̂ + size·N(0, I), from time t."""
    share = 1.0 if stochastic else 0.5  # of β·ε̂/σ in the drift
    plan = []
    for t, t_next in pairwise(euler_grid(steps)):
        beta, dt = float(process.beta(t)), t - t_next
        drift = share * beta * dt / float(process.sigma(t))
        size = (beta * dt) ** 0.5 if stochastic and t_next > 0.0 else 0.0  # the last step adds no noise
        plan.append((t, 1.0 + 0.5 * beta * dt, drift, size))
    return plan


def _euler(predict: PredictFn, x: Tensor, process: Interpolant, steps: int, noise: NoiseFn, stochastic: bool) -> Tensor:
    assert isinstance(process, VPSDE)  # checked in Sampler.check
    for k, (t, keep, drift, size) in enumerate(_euler_steps(process, steps, stochastic)):
        x = keep * x - drift * _noise_of(predict(x, _times(x, t)))
        if size:
            x = x + size * noise(k)
    return x


# ----------------------------------------------------------------- DPM-Solver-fast (Lu et al., 2022)
# In λ = ln(α/σ), half the log-SNR, the probability-flow ODE is linear except for ε̂:
#     x_t = (α_t/α_s)·x_s − α_t ∫ e^(−λ) ε̂ dλ   from λ_s to λ_t.
# A step of order k uses the Taylor terms of ε̂ below k, from k evaluations inside the interval.


def singlestep_orders(evaluations: int) -> list[int]:
    """Orders of the steps that spend exactly `evaluations`: threes first, e.g. 50 = 16·3 + 2 (Lu et al., §3.4)."""
    thirds, rest = divmod(evaluations, 3)
    if rest == 0:
        return [3] * (thirds - 1) + [2, 1]
    return [3] * thirds + [rest]


class _Point(NamedTuple):
    """A time and the schedule's values there."""

    lambda_: float
    t: float
    log_alpha: float
    sigma: float


@lru_cache(maxsize=4096)  # every batch visits the same points
def _point(process: Interpolant, lambda_: float) -> _Point:
    t = float(process.inverse_lambda(lambda_))
    return _Point(lambda_, t, float(process.log_alpha(t)), float(process.sigma(t)))


def _dpm_solver_fast(predict: PredictFn, x: Tensor, process: Interpolant, steps: int, noise: NoiseFn) -> Tensor:
    """From t_start to t_min in steps that are uniform in λ."""
    orders = singlestep_orders(steps)
    ends = float(process.lambda_(process.t_start)), float(process.lambda_(process.t_min))
    lambdas = np.linspace(*ends, len(orders) + 1).tolist()
    for order, (start, end) in zip(orders, pairwise(lambdas), strict=True):
        x = _singlestep(order, predict, x, process, start, end)
    return x


def _singlestep(order: int, predict: PredictFn, x: Tensor, process: Interpolant, start: float, end: float) -> Tensor:
    """One step of DPM-Solver-1, -2 (Algorithm 1) or -3 (Algorithm 2, r_1 = 1/3, r_2 = 2/3)."""
    s, t, h = _point(process, start), _point(process, end), end - start
    eps_fn = lambda x, t: _noise_of(predict(x, t))  # noqa: E731
    eps = eps_fn(x, _times(x, s.t))
    if order == 1:
        return _first_order(x, eps, s, t)
    if order == 2:
        middle = _point(process, start + 0.5 * h)
        u = _first_order(x, eps, s, middle)
        return _first_order(x, eps_fn(u, _times(u, middle.t)), s, t)
    r_1, r_2 = 1.0 / 3.0, 2.0 / 3.0
    s_1, s_2 = _point(process, start + r_1 * h), _point(process, start + r_2 * h)
    u_1 = _first_order(x, eps, s, s_1)
    d_1 = eps_fn(u_1, _times(u_1, s_1.t)) - eps
    u_2 = _first_order(x, eps, s, s_2) - (s_2.sigma * r_2 / r_1 * (expm1(r_2 * h) / (r_2 * h) - 1.0)) * d_1
    d_2 = eps_fn(u_2, _times(u_2, s_2.t)) - eps
    return _first_order(x, eps, s, t) - (t.sigma / r_2 * (expm1(h) / h - 1.0)) * d_2


def _first_order(x: Tensor, eps: Tensor, s: _Point, t: _Point) -> Tensor:
    """(α_t/α_s)·x − σ_t(e^h − 1)·ε̂: exact for constant ε̂."""
    return exp(t.log_alpha - s.log_alpha) * x - (t.sigma * expm1(t.lambda_ - s.lambda_)) * eps


# ------------------------------------------------------------ DPM-Solver++(3S) (Lu et al., 2022, second paper)
# The same in the predicted image x̂ = (x − σ·ε̂)/α:  x_t = (σ_t/σ_s)·x_s + σ_t ∫ e^λ x̂ dλ.  As in U-ViT's code for
# COCO, the evaluations are uniform in time, so the inner points of a step are at uneven shares r_1, r_2 of its λ.


def _dpm_solver_plus_plus_3s(predict: PredictFn, x: Tensor, process: Interpolant, steps: int, noise: NoiseFn) -> Tensor:
    """From t_start to t_min. A step of order k spends k evaluations and covers k intervals of the time grid."""
    times = torch.linspace(process.t_start, process.t_min, steps + 1, dtype=torch.float64)
    points = [_point(process, lambda_) for lambda_ in process.lambda_(times).tolist()]
    first = 0
    for order in singlestep_orders(steps):
        x = _image_step(predict, x, points[first : first + order + 1])
        first += order
    return x


def _image_step(predict: PredictFn, x: Tensor, points: list[_Point]) -> Tensor:
    """One step from the first to the last point, of order len(points) − 1."""

    def image(x: Tensor, at: _Point) -> Tensor:
        predicted = predict(x, _times(x, at.t))
        if isinstance(predicted, Denoised):
            return predicted.x_0
        return (x - at.sigma * predicted) / exp(at.log_alpha)

    def toward(at: _Point) -> Tensor:  # exact for constant x̂
        return (at.sigma / s.sigma) * x - (exp(at.log_alpha) * expm1(s.lambda_ - at.lambda_)) * x_0

    def second_term(at: _Point) -> float:
        h = at.lambda_ - s.lambda_
        return exp(at.log_alpha) * (expm1(-h) / h + 1.0)

    s, *inner, t = points
    x_0 = image(x, s)
    if not inner:
        return toward(t)
    r_1, *rest = ((at.lambda_ - s.lambda_) / (t.lambda_ - s.lambda_) for at in inner)
    d_1 = image(toward(inner[0]), inner[0]) - x_0
    if not rest:
        return toward(t) - (exp(t.log_alpha) * expm1(s.lambda_ - t.lambda_) / (2.0 * r_1)) * d_1
    r_2 = rest[0]
    d_2 = image(toward(inner[1]) + (r_2 / r_1 * second_term(inner[1])) * d_1, inner[1]) - x_0
    return toward(t) + (second_term(t) / r_2) * d_2


# ------------------------------------------------- DDPM, DDIM and DPM-Solver++ on a grid of 1000 steps
# One update in the predicted image x̂, for noise prediction (x − σ_s·ε̂)/α_s, from time s to the next time t, with
# λ = ln(α/σ) and h = λ_t − λ_s:
#     DDIM, η = 0        x ← (σ_t/σ_s)·x + α_t(1 − e^(−h))·x̂
#     DPM-Solver++(2M)   the same with x̂ + (h/2h')·(x̂ − x̂') for x̂, where x̂' and h' are those of the step before
#     DDPM               x ← (σ_t/σ_s)e^(−h)·x + α_t(1 − e^(−2h))·x̂ + σ_t√(1 − e^(−2h))·noise, its smaller variance;
#                        with σ_s·n_t/n_s for σ_t in front of the root, n = √(α² + σ²), its larger variance β
# The N times are evenly spaced from the last ("trailing"). At the end, t = 0, x is x̂. Where α_s = 0 (zero terminal SNR)
# λ_s = −∞ and the formulas hold in the limit. Results equal diffusers'
# DPMSolverMultistepScheduler of order 1 and 2 (tested) without its work at every step, and N need not divide 1000
# (DDIMScheduler then steps by 1000 // N).

GRID = 1000


def trailing_indices(steps: int) -> list[int]:
    """Grid indices 999 …, evenly spaced by 1000/steps."""
    return (np.linspace(GRID, 0, steps + 1)[:-1].round().astype(int) - 1).tolist()


class _GridStep(NamedTuple):
    """x ← keep·x + image·x̂ + previous·x̂' + noise·N(0, I), where x̂ = (x − sigma·ε̂)/alpha."""

    t: float
    alpha: float
    sigma: float
    keep: float
    image: float
    previous: float
    noise: float


@lru_cache(maxsize=16)
def _grid_steps(kind: str, process: Interpolant, steps: int) -> list[_GridStep]:
    """Coefficients of every step, in float64."""
    times = process.grid(GRID)[trailing_indices(steps)]
    alphas, sigmas = [*process.alpha(times).tolist(), 1.0], [*process.sigma(times).tolist(), 0.0]
    lambdas, norms = [*process.lambda_(times).tolist(), inf], [*process.norm(times).tolist(), 1.0]
    plan = []
    for s in range(steps):
        t, h = s + 1, lambdas[s + 1] - lambdas[s]
        ancestral = kind.startswith("ddpm")
        keep = sigmas[t] / sigmas[s] * (exp(-h) if ancestral else 1.0)
        image = -alphas[t] * expm1(-2 * h if ancestral else -h)
        larger = kind == "ddpm-large" and t < steps  # the last step adds no noise
        size = sigmas[s] * norms[t] / norms[s] if larger else sigmas[t]
        noise = size * (-expm1(-2 * h)) ** 0.5 if ancestral else 0.0
        # The first step has no x̂'. The step to t = 0 is of order 1, because its h is infinite.
        second_order = kind == "dpm-solver++" and 0 < s < steps - 1
        r = 0.5 * h / (lambdas[s] - lambdas[s - 1]) if second_order else 0.0
        plan.append(_GridStep(float(times[s]), alphas[s], sigmas[s], keep, image * (1 + r), -image * r, noise))
    return plan


def _grid_sampler(predict: PredictFn, x: Tensor, process: Interpolant, steps: int, noise: NoiseFn, kind: str) -> Tensor:
    previous = None
    for k, step in enumerate(_grid_steps(kind, process, steps)):
        t = _times(x, step.t)
        predicted = predict(x, t)
        if isinstance(predicted, Denoised) or not step.alpha:
            image = both(predicted, x, t, process).x_0
        else:
            image = torch.sub(x, predicted, alpha=step.sigma).div_(step.alpha)
        x = (step.keep * x).add_(image, alpha=step.image)
        if previous is not None and step.previous:
            x.add_(previous, alpha=step.previous)
        if step.noise:
            x.add_(noise(k), alpha=step.noise)
        previous = image
    return x


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Sampler("euler-maruyama", partial(_euler, stochastic=True), 1000, stochastic=True, continuous_only=True),
        Sampler("euler-ode", partial(_euler, stochastic=False), 1000, continuous_only=True),
        Sampler("dpm-solver-fast", _dpm_solver_fast, 50),
        Sampler("ddpm", partial(_grid_sampler, kind="ddpm"), 1000, stochastic=True, max_steps=GRID),
        Sampler("ddpm-large", partial(_grid_sampler, kind="ddpm-large"), 1000, stochastic=True, max_steps=GRID),
        Sampler("ddim", partial(_grid_sampler, kind="ddim"), 50, max_steps=GRID),
        Sampler("dpm-solver++", partial(_grid_sampler, kind="dpm-solver++"), 50, max_steps=GRID),
        Sampler("dpm-solver++3s", _dpm_solver_plus_plus_3s, 50),
    )
}
