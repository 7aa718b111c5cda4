"""Batches as a function of (config, step, position): there is no stream and no state, so nothing to resume."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion import Interpolant, Objective, get_objective
from scalelong.errors import DataError
from scalelong.models.registry import Shapes
from scalelong.runs.config import Config, Facts

Key = tuple[int, int, int, int]  # seed, stream, step and first position of random numbers


@dataclass(frozen=True)
class Batch:
    """Noise, times, images and conditions of (a part of) a batch."""

    x_0: Tensor  # (B, C, H, W)
    t: Tensor  # (B,), in the time of the process
    eps: Tensor  # (B, C, H, W)
    y: Tensor | None = None  # (B,)
    context: Tensor | None = None  # (B, L, D)
    drop: Tensor | None = None  # (B,) bool
    extra: Tensor | None = None  # (B, C, H, W), noise added to the network's input

    def to(self, device: torch.device) -> "Batch":
        # Only CUDA orders such a copy before what reads it; MPS may compute with a tensor that is not there yet.
        return self._mapped(lambda value: value.to(device, non_blocking=device.type == "cuda"))

    def pinned(self) -> "Batch":
        """Copy into page-locked memory, from which a GPU copies while it computes."""
        return self._mapped(lambda value: value.pin_memory())

    def part(self, start: int, count: int) -> "Batch":
        return self._mapped(lambda value: value[start : start + count])

    def every(self, stride: int) -> "Batch":
        return self._mapped(lambda value: value[::stride])

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {k: None if v is None else change(v) for k, v in vars(self).items()}
        return Batch(**changed)


class Examples:
    """The images of one split with their conditions."""

    def __init__(self, config: Config, split: str) -> None:
        from scalelong import data as sources

        d = config.data
        self.config = config
        self.objective: Objective = get_objective(config.diffusion.spec())
        self.process: Interpolant = self.objective.process
        self.images = sources.load(d.name, split, **d.options())
        self.source: Any = self.images
        if d.vae is not None:
            self.source = sources.encode_latents(self.images, vae=d.vae, scale=d.latent_scale, mirror=d.flip)
        self.tokens: Any = None
        if d.text is not None:
            if self.images.captions is None:
                raise DataError(f"data.text={d.text!r} needs captions, but {d.name} has none; set data.text=none")
            self.tokens = sources.encode_text(self.images, encoder=d.text, max_length=d.text_tokens)
        if d.classes and self.images.labels is None:
            raise DataError(f"data.classes=true needs labels, but {d.name} has none; set data.classes=false")
        if len(self.images) < 1:
            raise DataError(f"{d.name} has no images in split {split!r}")

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_classes(self) -> int | None:
        return self.images.num_classes if self.config.data.classes else None

    def facts(self) -> Facts:
        return Facts(self.shapes, self.images.class_names if self.config.data.classes else None)

    @cached_property
    def shapes(self) -> Shapes:
        channels, size = self.source.batch(torch.zeros(1, dtype=torch.int64)).shape[1:3]
        rows = self.num_classes
        if rows and self.config.diffusion.drop > 0:
            rows += 1
        text = (None, None) if self.tokens is None else tuple(self.tokens.empty.shape)
        return Shapes(channels, size, rows, *text)

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return positions first … first + count − 1 of the batch of step `step` (from 1), on any process."""
        seed, drop, has_text = self.config.seed, self.config.diffusion.drop, self.tokens is not None
        uniform = lambda stream: counter.uniform(seed, stream, step, first, count)  # noqa: E731
        return self._batch(
            self._order((step - 1) * self.config.train.batch_size + first, count),
            self.objective.training_times(uniform(Stream.TIME)),
            noise=(seed, Stream.NOISE, step, first),
            latent=(seed, Stream.LATENT, step, first),
            flip=uniform(Stream.FLIP) < 0.5 if self.config.data.flip else None,
            pick=counter.integers(seed, Stream.CAPTION, step, first, count, 2**31) if has_text else None,
            drop=uniform(Stream.DROP) < drop if drop > 0 and (self.num_classes or has_text) else None,
            extra=(seed, Stream.EXTRA_NOISE, step, first) if self.config.data.extra_noise else None,
        )

    def probe(self, n: int, share: int = 0, shares: int = 1) -> Batch:
        """Return a fixed batch: the first images of the split, evenly spread times in a fixed order, fixed noise.

        Of `shares` shares of it, return number `share`.
        """
        n = min(n, len(self))
        rows = torch.arange(n * share // shares, n * (share + 1) // shares)
        u = (counter.permutation(0, Stream.PROBE_TIME, 0, n)[rows] + 0.5) / n
        first = n * share // shares
        return self._batch(rows, self.objective.training_times(u.float()), noise=(0, Stream.PROBE_NOISE, 0, first))

    def _batch(
        self, indices: Tensor, t: Tensor, *, noise: Key, latent: Key | None = None,
        flip: Tensor | None = None, pick: Tensor | None = None, drop: Tensor | None = None, extra: Key | None = None,
    ) -> Batch:  # fmt: skip
        """`latent` is the key for a sample of the autoencoder's posterior; without it, latents are its mean."""
        if latent is None or self.source is self.images:
            x_0 = self.source.batch(indices, flip)
        else:
            shape = self.source.batch(indices[:1]).shape[1:]
            x_0 = self.source.batch(indices, flip, counter.normal(*latent, len(indices), shape))
        spread = self.config.data.extra_noise**0.5
        return Batch(
            x_0=x_0,
            t=t,
            eps=counter.normal(*noise, len(indices), x_0.shape[1:]),
            y=self.images.label_batch(indices) if self.num_classes else None,
            context=None if self.tokens is None else self.tokens.batch(indices, pick),
            drop=drop,
            extra=None if extra is None else spread * counter.normal(*extra, len(indices), x_0.shape[1:]),
        )

    def _order(self, start: int, count: int) -> Tensor:
        """Return `count` indices from position `start` of the endless sequence of shuffled epochs."""
        n, parts = len(self), []
        while count > 0:
            epoch, offset = divmod(start, n)
            part = _shuffled(self.config.seed, epoch, n)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(parts)


def check_classes(training: Examples, held_out: Examples | None) -> None:
    """Raise if the classes of held-out images are not those that the network is trained with."""
    if held_out is None or not training.config.data.classes:
        return
    names, others = training.images.class_names, held_out.images.class_names
    if names != others:
        data = training.config.data
        raise DataError(
            f"{data.name}: split {data.validation!r} has the classes {', '.join(others or ())}, but {data.split!r} has "
            f"{', '.join(names or ())}; give both the same classes, or set data.classes=false"
        )


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, n: int) -> Tensor:
    return counter.permutation(seed, Stream.ORDER, epoch, n)
