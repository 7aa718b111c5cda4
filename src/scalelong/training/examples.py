"""Batches as a function of (config, step, position): there is no stream and no state, so nothing to resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from scalelong import counter
from scalelong.counter import Stream
from scalelong.diffusion import Process, get_process
from scalelong.errors import DataError
from scalelong.models.registry import Shapes
from scalelong.runs.config import Config, Facts


@dataclass(frozen=True)
class Batch:
    """Noise, times, images and conditions of (a part of) a batch."""

    x_0: Tensor  # (B, C, H, W)
    t: Tensor  # (B,), in the time of the process
    eps: Tensor  # (B, C, H, W)
    y: Tensor | None = None  # (B,)
    context: Tensor | None = None  # (B, L, D)
    drop: Tensor | None = None  # (B,) bool

    def to(self, device: torch.device) -> Batch:
        moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Batch(**moved)

    def part(self, start: int, count: int) -> Batch:
        sliced = {k: v[start : start + count] if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Batch(**sliced)

    def conditions(self) -> dict[str, Any]:
        return {"y": self.y, "context": self.context, "drop": self.drop}


class Examples:
    """The images of one split with their conditions."""

    def __init__(self, config: Config, split: str) -> None:
        from scalelong import data as sources

        d = config.data
        self.config = config
        self.process: Process = get_process(config.diffusion.process)
        self.images = sources.load(d.name, split=split, image_size=d.image_size, skip_bad=d.skip_bad)
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

    @property
    def null_y(self) -> int | None:
        return self.facts().null_y

    def facts(self) -> Facts:
        return Facts(self.shapes, self.images.class_names if self.config.data.classes else None)

    @property
    def null_context(self) -> Tensor | None:
        return None if self.tokens is None else torch.as_tensor(self.tokens.empty)

    @cached_property
    def shapes(self) -> Shapes:
        example = self.source.batch(torch.zeros(1, dtype=torch.int64))
        rows = self.num_classes
        if rows and self.config.diffusion.drop > 0:
            rows += 1
        tokens, width = (None, None) if self.tokens is None else tuple(self.tokens.empty.shape)
        return Shapes(
            channels=example.shape[1], size=example.shape[2], label_rows=rows, text_tokens=tokens, text_width=width
        )

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return positions first … first + count − 1 of the batch of step `step` (from 1), on any process."""
        seed, drop = self.config.seed, self.config.diffusion.drop
        uniform = lambda stream: counter.uniform(seed, stream, step, first, count)  # noqa: E731
        indices = self._order((step - 1) * self.config.train.batch_size + first, count)
        flip = uniform(Stream.FLIP) < 0.5 if self.config.data.flip else None
        x_0 = self._images(indices, flip, (seed, Stream.LATENT, step, first))
        conditional = self.num_classes or self.tokens is not None
        dropped = uniform(Stream.DROP) < drop if conditional and drop > 0 else None
        pick = counter.integers(seed, Stream.CAPTION, step, first, count, 2**31) if self.tokens is not None else None
        times = self.process.times(uniform(Stream.TIME))
        return self._batch(indices, x_0, times, (seed, Stream.NOISE, step, first), pick, dropped)

    def probe(self, n: int) -> Batch:
        """Return a fixed batch: the first images of the split, evenly spread times in a fixed order, fixed noise."""
        n = min(n, len(self))
        u = (counter.permutation(0, Stream.PROBE_TIME, 0, n) + 0.5) / n
        indices = torch.arange(n)
        x_0 = self._images(indices, None, None)
        return self._batch(indices, x_0, self.process.times(u.float()), (0, Stream.PROBE_NOISE, 0, 0), None, None)

    def _images(self, indices: Tensor, flip: Tensor | None, posterior: tuple[int, int, int, int] | None) -> Tensor:
        """Return images, or latents: a sample of the autoencoder's posterior if a key is given, otherwise its mean."""
        if self.source is self.images or posterior is None:
            return self.source.batch(indices, flip)
        noise = counter.normal(*posterior, len(indices), self.source.batch(indices[:1]).shape[1:])
        return self.source.batch(indices, flip, noise)

    def _batch(
        self,
        indices: Tensor,
        x_0: Tensor,
        t: Tensor,
        noise: tuple[int, int, int, int],
        pick: Tensor | None,
        drop: Tensor | None,
    ) -> Batch:
        return Batch(
            x_0=x_0,
            t=t,
            eps=counter.normal(*noise, len(indices), x_0.shape[1:]),
            y=self.images.label_batch(indices) if self.num_classes else None,
            context=None if self.tokens is None else self.tokens.batch(indices, pick),
            drop=drop,
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


@lru_cache(maxsize=2)
def _shuffled(seed: int, epoch: int, n: int) -> Tensor:
    return counter.permutation(seed, Stream.ORDER, epoch, n)
