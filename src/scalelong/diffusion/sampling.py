"""Generate images with a network: one generator of batches for commands, sample grids and metrics."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong import counter
from scalelong._modules import device_of, evaluating, fast_matmul
from scalelong.counter import Stream
from scalelong.diffusion.network import Network, guided
from scalelong.diffusion.network import clip_denoised as clip_prediction
from scalelong.diffusion.samplers import PredictFn, Sampler, get_sampler
from scalelong.errors import ScaleLongError, invalid
from scalelong.objective import Objective, get_objective
from scalelong.process import Interpolant

FAR = 1.5


@dataclass
class RangeCheck:
    """Counts samples that leave the data's range [−1, 1] before the final clamp hides it: pass it as `check`."""

    n: int = 0
    far: int = 0  # samples with a value beyond ±FAR
    largest: float = 0.0

    def __call__(self, x: Tensor) -> None:
        largest = x.abs().flatten(1).amax(1)  # (B,)
        self.n, self.far = self.n + len(x), self.far + int((largest > FAR).sum())
        self.largest = max(self.largest, largest.max().item())

    @property
    def share(self) -> float:
        return self.far / max(1, self.n)

    def __str__(self) -> str:
        """Return a remark for the user, empty if all samples were near the range."""
        if not self.far:
            return ""
        return (
            f"{self.far} of {self.n} samples reached |x| > {FAR:g} before the final clamp (largest {self.largest:.3g})"
        )


def sample(
    net: Network,
    n: int,
    shape: Sequence[int],
    process: str | Interpolant | Objective,
    *,
    sampler: str | Sampler = "dpm-solver-fast",
    steps: int | None = None,
    seed: int = 0,
    first: int = 0,
    batch_size: int = 64,
    y: int | Tensor | None = None,
    context: Tensor | Callable[[int, int], Tensor] | None = None,
    guidance: float = 1.0,
    null_y: int | None = None,
    null_context: Tensor | None = None,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    clip: bool = True,
    clip_denoised: bool = False,
    check: Callable[[Tensor], None] | None = None,
) -> Iterator[Tensor]:
    """Yield images first … first + n − 1 in batches: float32 (B, *shape) on `device`.

    The noise of image k depends on (seed, k) alone, so neither the batch size nor a split over processes changes an
    image. The global random state is not used. Arguments are validated before the first batch is requested.

    Args:
        process: the objective of training, or the process of a network that predicts noise.
        sampler: one of `SAMPLERS`, or the name of a diffusers scheduler.
        y: labels (n,), or one label for all images.
        context: text tokens (n, L, D), or (L, D) for all images, or `context(start, count)` that returns those of a
            batch when it is sampled, so that they are never all in memory.
        guidance: strength of classifier-free guidance; 1 is none.
        null_y: the null label, as in training.
        null_context: tokens of the empty prompt, as in training.
        device: defaults to the network's device.
        autocast: dtype of the network's mixed precision; x stays float32.
        clip: clamp the final images to [−1, 1]; pass False for latents.
        clip_denoised: clamp the predicted x_0 to [−1, 1] at every step.
        check: called with every batch before `clip`, for example a `RangeCheck`.
    """
    objective, sampler = get_objective(process), get_sampler(sampler)
    process, steps = objective.process, sampler.check(objective, steps)
    for name, value, least in (("n", n, 0), ("batch_size", batch_size, 1)):
        if value < least:
            raise invalid(name, f"an integer >= {least}", value)
    target = torch.device(device) if device is not None else device_of(net)
    tokens = context if callable(context) else _per_image("context", context, n, 3)
    given = {"y": _per_image("y", y, n, 1), "context": tokens}
    conditions = {name: value for name, value in given.items() if value is not None}

    def prediction(start: int, count: int) -> PredictFn:
        rows = {
            name: (value(start, count) if callable(value) else value[start : start + count]).to(target)
            for name, value in conditions.items()
        }
        predict = guided(net, objective, guidance, **rows, null_y=null_y, null_context=null_context)
        return clip_prediction(predict, process) if clip_denoised else predict

    def batch(start: int, count: int) -> Tensor:
        def noise(k: int) -> Tensor:
            return counter.normal(seed, Stream.SAMPLE, k + 1, first + start, count, shape).to(target)

        predict = prediction(start, count)
        mixed = torch.autocast(target.type, autocast, enabled=autocast is not None)
        with torch.no_grad(), mixed, fast_matmul(target), evaluating(net):
            x = sampler(predict, process.prior_std * noise(-1), process, steps, noise)
        if not x.isfinite().all():
            raise ScaleLongError(
                f"images {first + start} … {first + start + count - 1} contain NaN or infinity"
                f" (sampler {sampler.name!r}, {steps} steps); check the network's weights, or sample in fp32"
            )
        if check is not None:
            check(x)
        return x.clamp(-1.0, 1.0) if clip else x

    prediction(0, min(n, 1))  # validate the conditions now, not at the first batch
    # The contexts close before each batch is yielded, so they do not leak into the consumer's code.
    return (batch(start, min(batch_size, n - start)) for start in range(0, n, batch_size))


def to_uint8(samples: Tensor) -> Tensor:
    """Convert float images (B, C, H, W) in [−1, 1] to uint8 (B, H, W, C), rounded to the nearest level."""
    if samples.ndim != 4 or not samples.is_floating_point():
        raise invalid("samples", "float of shape (B, C, H, W)", f"{samples.dtype} {tuple(samples.shape)}")
    bad = int((~samples.isfinite()).flatten(1).any(1).sum())
    if bad:
        raise invalid("samples", "finite", f"NaN or infinity in {bad} of {len(samples)} samples")
    levels = samples.float().add(1).mul(127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _per_image(name: str, value: int | Tensor | None, n: int, ndim: int) -> Tensor | None:
    """Expand a condition of ndim − 1 dimensions to all n images; check that any other has one row per image."""
    if value is None:
        return None
    value = torch.as_tensor(value)
    if value.ndim == ndim - 1:
        return value.expand(n, *value.shape)
    if value.ndim != ndim or len(value) != n:
        raise invalid(f"the shape of {name}", f"one row for each of {n} images, or one for all", tuple(value.shape))
    return value
