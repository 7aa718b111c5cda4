"""How far a denoiser's prediction and loss move under extra Gaussian noise at its input (the paper's Fig. 3c)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.diffusion.network import Conditions, Network, Spec, predict
from scalelong.errors import invalid
from scalelong.interpolant import as_float64
from scalelong.objective import get_objective


@dataclass(frozen=True)
class Moved:
    """Means over samples, for x'_t = x_t + δ with δ ~ N(0, σ_δ²·I) at the network's input; ε is the noise in x_t.

    change: E‖ε̂(x'_t) − ε̂(x_t)‖²/m, on the scale of the loss.
    gain: √(E‖ε̂(x'_t) − ε̂(x_t)‖²/E‖δ‖²), the amplification of the extra noise; NaN for σ_δ = 0.
    loss: E‖ε − ε̂(x'_t)‖²/m.

    For another objective than noise prediction its target F and the network's output F̂ take the place of ε and ε̂.
    """

    change: float
    gain: float
    loss: float
    samples: int


@dataclass(frozen=True)
class Sensitivity:
    """Results for one σ_δ²: over all timesteps, and per timestep bin (None for a bin without samples)."""

    variance: float
    overall: Moved
    by_time: tuple[Moved | None, ...]


def measure_sensitivity(
    net: Network,
    objective: Spec,
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
    """Compare predictions at x_t + δ with those at x_t, with the same directions of δ for every σ_δ².

    Args:
        objective: what the network predicts; a process means noise prediction on it.
        x_0: images, (B, …).
        eps: noise, (B, …).
        t: times in the process's own unit, (B,).
        conditions: keyword arguments of the network, one row per sample.
        variances: values of σ_δ².
        edges: edges of the timestep bins, increasing.
        draws: number of δ per sample.
    """
    for variance in variances:
        if not (variance >= 0 and math.isfinite(variance)):
            raise invalid("a variance of extra noise", "a finite number >= 0", variance)
    if draws < 1:
        raise invalid("draws", "an integer >= 1", draws)
    if not len(x_0):
        raise invalid("x_0", "at least one sample", tuple(x_0.shape))
    objective = get_objective(objective)
    changes, losses, sizes = (torch.zeros(len(variances), len(x_0), dtype=torch.float64) for _ in range(3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for start in range(0, len(x_0), batch_size):
            part = slice(start, start + batch_size)
            batch = {name: value[part] for name, value in (conditions or {}).items()}
            x_t = objective.process.add_noise(x_0[part], eps[part], t[part])
            target = objective.target_of(x_0[part], eps[part], t[part])
            clean = predict(net, objective, x_t, t[part], batch)
            for _ in range(draws):
                direction = torch.randn(x_t.shape, generator=generator).to(x_t)
                for k, variance in enumerate(variances):
                    delta = math.sqrt(variance) * direction
                    perturbed = predict(_moved(net, delta), objective, x_t, t[part], batch) if variance else clean
                    changes[k, part] += _mean_square(perturbed - clean) / draws
                    losses[k, part] += _mean_square(target - perturbed) / draws
                    sizes[k, part] += _mean_square(delta) / draws
    inner = torch.tensor(list(edges[1:-1]), dtype=torch.float64)
    bins = torch.bucketize(t.cpu().double(), inner, right=True)
    masks = [bins == b for b in range(len(edges) - 1)]
    results = []
    for variance, change, loss, size in zip(variances, changes, losses, sizes, strict=True):
        by_time = tuple(_means(change[m], loss[m], size[m]) if m.any() else None for m in masks)
        results.append(Sensitivity(float(variance), _means(change, loss, size), by_time))
    return results


def _moved(net: Network, delta: Tensor) -> Network:
    return lambda x, *arguments, **conditions: net(x + delta, *arguments, **conditions)


def _means(changes: Tensor, losses: Tensor, sizes: Tensor) -> Moved:
    change, size = float(changes.mean()), float(sizes.mean())
    gain = math.sqrt(change / size) if size else math.nan
    return Moved(change, gain, float(losses.mean()), len(changes))


def _mean_square(x: Tensor) -> Tensor:
    return as_float64(x).square().flatten(1).mean(1).cpu()
