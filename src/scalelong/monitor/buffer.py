"""Losses and gradient norms of every step, kept on their device until the next snapshot."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.monitor.recorder import to_cpu

CAPACITY = 10_000  # values kept if no snapshot is taken


@dataclass(frozen=True)
class Buffered:
    """The values noted since the last snapshot."""

    loss: dict[str, Any] | None = None
    gradients: tuple[tuple[int, float], ...] = ()  # (step, total norm), finite ones only
    bad_loss: int | None = None  # the first step whose loss is not finite
    bad_gradient: int | None = None


class Buffer:
    def __init__(self) -> None:
        self._losses: deque[tuple[int, Tensor, Tensor | None]] = deque(maxlen=CAPACITY)  # (step, losses, timesteps)
        self._gradients: deque[tuple[int, Tensor]] = deque(maxlen=CAPACITY)

    def add(self, step: int, loss: Any, t: Any, grad_norm: Any) -> None:
        if loss is not None:
            values = torch.as_tensor(loss).detach()
            values = values.flatten(1).mean(1) if values.ndim > 1 else values.reshape(-1)
            times = None if t is None else torch.as_tensor(t).detach().reshape(-1)
            self._losses.append((step, values, times if times is not None and times.shape == values.shape else None))
        if grad_norm is not None:
            self._gradients.append((step, torch.as_tensor(grad_norm).detach().reshape(())))

    def collect(self, edges: Sequence[float], after: int) -> Buffered:
        """Return and clear the buffer, with one synchronization for losses and one for gradient norms.

        Gradient norms of steps up to `after`, the last snapshot, are dropped: that snapshot measured them itself.
        """
        recent = [(step, norm) for step, norm in self._gradients if step > after]
        norms = to_cpu([norm for _, norm in recent]).tolist() if recent else []
        gradients = [(step, norm) for (step, _), norm in zip(recent, norms, strict=True)]
        bad_gradient = next((step for step, norm in gradients if not math.isfinite(norm)), None)
        finite = tuple((step, norm) for step, norm in gradients if math.isfinite(norm))
        losses = list(self._losses)
        self._losses.clear()
        self._gradients.clear()
        if not losses:
            return Buffered(None, finite, None, bad_gradient)
        values = _concatenate([v for _, v, _ in losses]).double()
        steps = sorted({step for step, _, _ in losses})  # gradient accumulation may note a step in parts
        index = torch.tensor([steps.index(step) for step, _, _ in losses])
        of_step = index.repeat_interleave(torch.tensor([len(v) for _, v, _ in losses]))
        means = dict(zip(steps, _group_means(values, of_step, len(steps)), strict=True))
        good = {step: mean for step, mean in means.items() if math.isfinite(mean)}
        loss: dict[str, Any] = {"mean": None, "max": None, "at": None, "steps": len(steps)}
        if good:
            at = max(good, key=lambda step: good[step])
            loss |= {"mean": math.fsum(good.values()) / len(good), "max": good[at], "at": at}
        times = [t for _, _, t in losses if t is not None]
        if len(times) == len(losses):
            usable = values.isfinite()
            bins = which_bin(_concatenate(times), edges)
            loss["bins"] = _group_means(values[usable], bins[usable], len(edges) - 1)
        return Buffered(loss, finite, next((step for step in steps if step not in good), None), bad_gradient)


def which_bin(times: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the bin of each timestep. Timesteps outside the edges count in the first or last bin."""
    inner = torch.tensor(list(edges[1:-1]), dtype=torch.float64)
    return torch.bucketize(times.double().cpu(), inner, right=True)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.to(parts[0].device, torch.float32) for part in parts]).cpu()


def _group_means(values: Tensor, groups: Tensor, count: int) -> list[float]:
    """Return the mean of the values in each group; NaN for an empty group."""
    return (groups.bincount(values, minlength=count) / groups.bincount(minlength=count)).tolist()
