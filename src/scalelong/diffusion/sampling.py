"""Images from a network: a generator of batches that commands, sample grids and metrics share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from scalelong import counter
from scalelong._modules import device_of, evaluating
from scalelong.counter import Stream
from scalelong.diffusion.guidance import clip_denoised as clip_prediction
from scalelong.diffusion.guidance import guided
from scalelong.diffusion.network import Network
from scalelong.diffusion.samplers import Callback, EpsFn, Sampler, get_sampler
from scalelong.errors import ScaleLongError
from scalelong.process import Process, get_process


def sample(
    net: Network,
    n: int,
    shape: Sequence[int],
    process: str | Process,
    *,
    sampler: str | Sampler = "dpm-solver-fast",
    steps: int | None = None,
    seed: int = 0,
    first: int = 0,
    batch_size: int = 64,
    y: int | Tensor | None = None,
    context: Tensor | None = None,
    guidance: float = 1.0,
    null_y: int | None = None,
    null_context: Tensor | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    clip: bool = True,
    clip_denoised: bool = False,
    callback: Callback | None = None,
) -> Iterator[Tensor]:
    """Yield the images first … first + n − 1 in batches: float32 (B, *shape) on `device`.

    Image k's noise is keyed by (seed, k), so no batch size and no split over processes changes an image,
    and no global random state is read or written. Arguments are checked before the first batch is asked for.

    y: (n,) labels, or one for all; context: (n, L, D) text tokens, or (L, D) for all; guidance: see `guided`.
    device: where the network is, by default. autocast: the dtype of the network's mixed precision; x stays float32.
    clip: clamp the finished images to [−1, 1] (not for latents). clip_denoised: clamp every prediction of x_0.
    """
    process, sampler = get_process(process), get_sampler(sampler)
    steps = sampler.default_steps if steps is None else steps
    sampler.check(process, steps)
    if n < 0 or batch_size < 1:
        raise ScaleLongError(f"n must be at least 0 and batch_size at least 1, got {n} and {batch_size}")
    place = torch.device(device) if device is not None else device_of(net)
    labels, tokens = _for_every_image("y", y, n, 1), _for_every_image("context", context, n, 3)

    def prediction(start: int, count: int) -> EpsFn:
        eps_fn = guided(
            net,
            process,
            guidance,
            y=None if labels is None else labels[start : start + count].to(place),
            context=None if tokens is None else tokens[start : start + count].to(place),
            null_y=null_y,
            null_context=null_context,
        )
        return clip_prediction(eps_fn, process) if clip_denoised else eps_fn

    def batch(start: int, count: int) -> Tensor:
        def noise(k: int) -> Tensor:
            return counter.normal(seed, Stream.SAMPLE, k + 1, first + start, count, shape).to(place)

        eps_fn = prediction(start, count)
        with torch.no_grad(), torch.autocast(place.type, autocast, enabled=autocast is not None), evaluating(net):
            x = sampler(eps_fn, noise(-1), process, steps, noise, callback)
        if not x.isfinite().all():
            raise ScaleLongError(
                f"sampling gave non-finite values in images {first + start} … {first + start + count - 1}"
                f" (sampler {sampler.name!r}, {steps} steps): the network diverged or its precision overflows"
            )
        return x.clamp(-1.0, 1.0) if clip else x

    prediction(0, min(n, 1))  # what is wrong with the conditions is said now, not at the first batch
    # The contexts close before each batch is handed over, so that they never leak into the consumer's code.
    return (batch(start, min(batch_size, n - start)) for start in range(0, n, batch_size))


def _for_every_image(name: str, value: int | Tensor | None, n: int, ndim: int) -> Tensor | None:
    """(n, …): a condition for each image; one of fewer dimensions is for all."""
    if value is None:
        return None
    value = torch.as_tensor(value)
    if value.ndim == ndim - 1:
        return value.expand(n, *value.shape)
    if value.ndim != ndim or len(value) != n:
        raise ScaleLongError(
            f"{name} must have one entry for each of {n} images or one for all, got shape {tuple(value.shape)}"
        )
    return value
