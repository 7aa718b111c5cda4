"""The distribution of ‖ε‖²/‖x_t‖² over a dataset and a noise process (the paper's Fig. 3a and 3b)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.process import Process, get_process
from scalelong.progress import track

PIXEL_BINS = 64
CHUNK_VALUES = 1 << 22  # values converted to float at a time


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges; `below` and `above` count what lies outside them."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True)
class Ratios:
    """Samples of one (image, time, noise) each, and what the images themselves are like.

    ratio: ‖ε‖²/‖x_t‖².  (samples,)    input_norm: ‖x_t‖²/m.  (samples,)    alpha_bar: ᾱ_t.  (samples,)
    """

    ratio: Tensor
    input_norm: Tensor
    alpha_bar: Tensor
    dimension: int
    num_images: int
    pixel_second_moment: float
    pixels: Histogram
    smallest: float
    largest: float


def sample_ratios(
    images: Any, process: str | Process | Sequence[float] | Tensor, samples: int, seed: int, latents: bool
) -> Ratios:
    """Draw times and noise for the images and measure.

    The noise is not drawn pixel by pixel: ‖x_t‖² and ‖ε‖² depend on it only through z = ⟨ε, x_0⟩/‖x_0‖, which is
    N(0, 1), and ‖ε‖² − z², which is χ² with m − 1 degrees of freedom and independent of z. That is exact.
    Times are stratified: every one of `samples` equal shares of the process has one.
    """
    shape = _checked_shape(images)
    if not isinstance(samples, int) or samples < 1:
        raise ScaleLongError(f"samples is {samples!r}; it must be an integer of at least 1")
    generator = torch.Generator().manual_seed(seed)
    n, m = shape[0], int(torch.Size(shape[1:]).numel())
    chosen = torch.randperm(n, generator=generator)[:samples].sort().values
    energy, pixels, smallest, largest = _energies(images, chosen, m, latents)  # ‖x_0‖² (min(n, samples),)

    u = (torch.arange(samples) + torch.rand(samples, generator=generator, dtype=torch.float64)) / samples
    u = u[torch.randperm(samples, generator=generator)].clamp(1e-12, 1 - 1e-12)
    a = _alpha_bars(process, u)  # (samples,)
    e = energy[torch.arange(samples) % len(energy)]  # image k gets its share of the shuffled times
    z = torch.randn(samples, generator=generator, dtype=torch.float64)
    rest = _chi_square(m - 1, samples, seed)
    eps = z.square() + rest
    x_t = a * e + 2 * (a * (1 - a) * e).sqrt() * z + (1 - a) * eps
    return Ratios(
        ratio=eps / x_t.clamp(min=0),
        input_norm=x_t / m,
        alpha_bar=a,
        dimension=m,
        num_images=n,
        pixel_second_moment=float(energy.mean() / m),
        pixels=pixels,
        smallest=smallest,
        largest=largest,
    )


def histogram(values: Tensor, low: float, high: float, bins: int) -> Histogram:
    """Counts in equal bins of [low, high]; infinite values count as above."""
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    inside = (values >= low) & (values <= high)
    counts = torch.histogram(values[inside].to(torch.float64), edges).hist
    below, above = int((values < low).sum()), int((values > high).sum())
    return Histogram(tuple(edges.tolist()), tuple(int(c) for c in counts.tolist()), below, above)


def _energies(images: Any, chosen: Tensor, m: int, latents: bool) -> tuple[Tensor, Histogram, float, float]:
    """‖x_0‖² of the chosen images, and the distribution of their pixels."""
    step = max(1, CHUNK_VALUES // m)
    energies: list[Tensor] = []
    counts = torch.zeros(PIXEL_BINS + 2, dtype=torch.long)
    smallest, largest = float("inf"), -float("inf")
    for start in track(range(0, len(chosen), step), "measuring images"):
        raw = _take(images, chosen[start : start + step])
        counts += _pixel_counts(raw)
        x = (raw.float() / 127.5 - 1 if raw.dtype == torch.uint8 else raw.float()).flatten(1)  # (b, m)
        low, high = (float(end) for end in x.aminmax())
        _check_range(low, high, latents)
        smallest, largest = min(smallest, low), max(largest, high)
        energies.append(torch.linalg.vector_norm(x, dim=1).double().square())
    below, *inside, above = counts.tolist()
    edges = torch.linspace(-1, 1, PIXEL_BINS + 1, dtype=torch.float64)
    return torch.cat(energies), Histogram(tuple(edges.tolist()), tuple(inside), below, above), smallest, largest


def _pixel_counts(raw: Tensor) -> Tensor:
    """Counts below −1, in PIXEL_BINS bins of [−1, 1], and above 1: of every byte, or of every 16th float."""
    if raw.dtype == torch.uint8:  # four levels a bin
        levels = torch.bincount(raw.flatten(), minlength=256)
        return torch.nn.functional.pad(levels.view(PIXEL_BINS, -1).sum(1), (1, 1))
    part = histogram(raw.flatten()[::16].double(), -1.0, 1.0, PIXEL_BINS)
    return torch.tensor([part.below, *part.counts, part.above])


def _take(images: Any, indices: Tensor) -> Tensor:
    if isinstance(images, Tensor):
        return images[indices.to(images.device)].detach().cpu()
    return torch.tensor(images[indices.numpy()])  # a copy: what a read-only memory map gives must not be written


def _check_range(low: float, high: float, latents: bool) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ScaleLongError("the images hold NaN or infinite values")
    if not latents and max(-low, high) > 1 + 1e-3:
        raise ScaleLongError(
            f"float images must lie in [-1, 1]; these reach from {low:.4g} to {high:.4g}. Rescale them, pass uint8, "
            "or pass latents=True for an autoencoder's latents as they go into the network"
        )


def _checked_shape(images: Any) -> tuple[int, ...]:
    shape, dtype = getattr(images, "shape", None), str(getattr(images, "dtype", "")).removeprefix("torch.")
    if shape is None:
        raise ScaleLongError(f"images must be a numpy array or a tensor, not {type(images).__name__}")
    if len(shape) not in (4, 5):
        raise ScaleLongError(
            f"images has shape {tuple(shape)}; uint8 (n, h, w, c) or float (n, c, h, w) is needed "
            "(volumes have one axis more; one image alone is images[None])"
        )
    if 0 in tuple(shape):
        raise ScaleLongError(f"images has shape {tuple(shape)}: there are no images in it")
    if dtype != "uint8" and "float" not in dtype:
        raise ScaleLongError(f"images has dtype {dtype}; it must be uint8 (0 to 255) or float in [-1, 1]")
    return tuple(int(size) for size in shape)


def _alpha_bars(process: str | Process | Sequence[float] | Tensor, u: Tensor) -> Tensor:
    """ᾱ at the times that the process trains on for the uniforms `u`, or drawn evenly from a table of ᾱ."""
    if isinstance(process, str) or process_name(process) is not None:
        chosen = get_process(process) if isinstance(process, str) else process
        return chosen.alpha_bar(chosen.times(u))  # type: ignore[union-attr]
    table = torch.as_tensor(process, dtype=torch.float64).cpu()
    if table.ndim != 1 or not len(table) or not bool(((table >= 0) & (table <= 1)).all()):
        raise ScaleLongError(
            "process is a name or the values of ᾱ_t, numbers between 0 and 1 such as scheduler.alphas_cumprod"
        )
    return table[(u * len(table)).floor().long()]


def process_name(process: object) -> str | None:
    """The name of a process of `scalelong.diffusion`, or None for values of ᾱ."""
    if isinstance(process, Tensor) or not hasattr(process, "alpha_bar"):
        return None
    return str(getattr(process, "name", type(process).__name__))


def _chi_square(degrees: int, samples: int, seed: int) -> Tensor:
    if degrees == 0:
        return torch.zeros(samples, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):  # torch's gamma sampler takes no generator
        torch.random.manual_seed(seed)
        return torch.distributions.Chi2(torch.tensor(float(degrees), dtype=torch.float64)).sample((samples,))
