"""Data with a closed-form noise prediction, and the exact distribution of a sampler's output on it.

x_0 ~ N(μ, s²): x_t ~ N(αμ, α²s² + σ²), so ε*(x, t) = σ(x − αμ)/(α²s² + σ²), affine in x. A sampler is then an
affine function of x_T and its noises z_1 … z_N, all independent normals. Unit inputs, one image each, give its slopes
exactly, so the mean and variance of its output have no Monte Carlo error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.diffusion import Process, Sampler


@dataclass(frozen=True)
class GaussianData:
    mean: float = 0.4
    std: float = 0.5

    def marginal(self, process: Process, t: float) -> tuple[float, float]:
        """Mean and standard deviation of x_t."""
        alpha, sigma = float(process.alpha(t)), float(process.sigma(t))
        return alpha * self.mean, ((alpha * self.std) ** 2 + sigma**2) ** 0.5

    def eps(self, process: Process):
        def eps_fn(x: Tensor, t: Tensor) -> Tensor:
            alpha = process.alpha(t).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            sigma = process.sigma(t).to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            return sigma * (x - alpha * self.mean) / ((alpha * self.std) ** 2 + sigma**2)

        return eps_fn

    def ode_solution(self, process: Process, x_T: Tensor, t: float) -> Tensor:
        """Solve the probability-flow ODE: it keeps each point's quantile."""
        mean_T, std_T = self.marginal(process, process.t_max)
        mean_t, std_t = self.marginal(process, t)
        return mean_t + std_t / std_T * (x_T - mean_T)


@dataclass(frozen=True)
class Law:
    mean: float
    std: float


def output_law(sampler: Sampler, process: Process, data: GaussianData, steps: int, prior: bool = False) -> Law:
    """Mean and standard deviation of a sampler's output, from the exact x_T or from the prior N(0, 1)."""
    mean_T, std_T = (0.0, 1.0) if prior else data.marginal(process, process.t_max)
    x_T = torch.full((steps + 2, 1), mean_T, dtype=torch.float64)
    x_T[0] += std_T  # image 0: one unit of x_T; images 1 … N: one unit of one noise; the last: none

    def noise(k: int) -> Tensor:
        unit = torch.zeros_like(x_T)
        unit[k + 1] = 1.0
        return unit

    x = sampler(data.eps(process), x_T, process, steps, noise).flatten()
    slopes = x[:-1] - x[-1]
    return Law(x[-1].item(), slopes.square().sum().sqrt().item())
