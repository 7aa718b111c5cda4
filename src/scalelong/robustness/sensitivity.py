"""How far a denoiser's prediction and loss move when extra Gaussian noise is at its input (the paper's Fig. 3c)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.diffusion.network import Conditions, Network, predict_noise
from scalelong.errors import ScaleLongError
from scalelong.process import Process


@dataclass(frozen=True)
class Moved:
    """Means over samples. With x'_t = x_t + δ, δ ~ N(0, σ_δ²·I), and ε the noise that x_t was made with:

    change      E‖ε̂(x'_t) − ε̂(x_t)‖²/m, on the loss's own scale
    gain        √(E‖ε̂(x'_t) − ε̂(x_t)‖²/E‖δ‖²): how much of the extra noise comes through; NaN for σ_δ = 0
    loss        E‖ε − ε̂(x'_t)‖²/m
    """

    change: float
    gain: float
    loss: float
    samples: int


@dataclass(frozen=True)
class Sensitivity:
    """One σ_δ²: over all timesteps, and bin by bin (None for a bin without samples)."""

    variance: float
    overall: Moved
    by_time: tuple[Moved | None, ...]


def measure_sensitivity(
    net: Network,
    process: Process,
    x_0: Tensor,
    t: Tensor,
    eps: Tensor,
    conditions: Conditions | None = None,
    *,
    variances: Sequence[float],
    edges: Sequence[float],
    draws: int = 4,
    seed: int = 0,
    batch_size: int = 64,
) -> list[Sensitivity]:
    """Hold predictions at x_t + δ against those at x_t, with the same directions of δ for every σ_δ².

    x_0, eps: (B, …); t: (B,) in the process's own time; edges: of the timestep bins; draws: δ's for each sample.
    """
    for variance in variances:
        if not (variance >= 0 and math.isfinite(variance)):
            raise ScaleLongError(f"a variance of extra noise is a number from 0 up, not {variance}")
    if draws < 1:
        raise ScaleLongError(f"draws is at least 1, not {draws}")
    moved, losses, sizes = (torch.zeros(len(variances), len(x_0), dtype=torch.float64) for _ in range(3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in _parts(len(x_0), batch_size):
            given = {name: value[part] for name, value in (conditions or {}).items()}
            x_t, target = process.add_noise(x_0[part], eps[part], t[part]), eps[part]
            still = predict_noise(net, process, x_t, t[part], given)
            for _ in range(draws):
                direction = torch.randn(x_t.shape, generator=generator).to(x_t)
                for k, variance in enumerate(variances):
                    delta = math.sqrt(variance) * direction
                    shaken = predict_noise(net, process, x_t + delta, t[part], given) if variance else still
                    moved[k, part] += _mean_square(shaken - still) / draws
                    losses[k, part] += _mean_square(target - shaken) / draws
                    sizes[k, part] += _mean_square(delta) / draws
    inner = torch.tensor(list(edges[1:-1]), dtype=torch.float64)
    which = torch.bucketize(t.double().cpu(), inner, right=True)
    return [
        Sensitivity(
            float(variance),
            _moved(moved[k], losses[k], sizes[k], torch.ones_like(which, dtype=torch.bool)) or _nothing(),
            tuple(_moved(moved[k], losses[k], sizes[k], which == b) for b in range(len(edges) - 1)),
        )
        for k, variance in enumerate(variances)
    ]


def _moved(moved: Tensor, losses: Tensor, sizes: Tensor, here: Tensor) -> Moved | None:
    if not here.any():
        return None
    change, size = float(moved[here].mean()), float(sizes[here].mean())
    gain = math.sqrt(change / size) if size else math.nan
    return Moved(change, gain, float(losses[here].mean()), int(here.sum()))


def _nothing() -> Moved:
    raise ScaleLongError("there are no samples to measure on")


def _mean_square(x: Tensor) -> Tensor:
    return x.double().square().flatten(1).mean(1).cpu()


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(count, start + size)) for start in range(0, count, size))
