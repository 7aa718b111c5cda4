"""Losses and gradient norms of every step, kept where they are until the next look: no step waits for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scalelong.monitor.log import number, rounded
from scalelong.monitor.reading import read

MOST = 10_000  # notes kept where nobody looks


@dataclass(frozen=True)
class Buffered:
    """What was noted since the last look."""

    loss: dict[str, Any] | None = None
    gradients: tuple[tuple[int, float], ...] = ()  # (step, total norm)
    bad_loss: int | None = None  # the first step whose loss is not finite
    bad_gradient: int | None = None

    def without_gradient_trouble(self) -> Buffered:
        return replace(self, bad_gradient=None)


class Buffer:
    def __init__(self) -> None:
        self._losses: deque[tuple[int, Tensor, Tensor | None]] = deque(maxlen=MOST)
        self._gradients: deque[tuple[int, Tensor]] = deque(maxlen=MOST)

    def add(self, step: int, loss: Any, t: Any, grad_norm: Any) -> None:
        if loss is not None:
            values = torch.as_tensor(loss).detach()
            values = values.flatten(1).mean(1) if values.ndim > 1 else values.reshape(-1)
            times = None if t is None else torch.as_tensor(t).detach().reshape(-1)
            self._losses.append((step, values, times if times is not None and times.shape == values.shape else None))
        if grad_norm is not None:
            self._gradients.append((step, torch.as_tensor(grad_norm).detach().reshape(())))

    def collect(self, edges: Sequence[float], after: int) -> Buffered:
        """Everything since the last call, in one look at the device for each kind.

        Gradient norms of steps up to `after`, the last look, are left out: it has seen them itself.
        """
        since = [(step, norm) for step, norm in self._gradients if step > after]
        norms = read([norm for _, norm in since]).tolist() if since else []
        noted = [(step, norm) for (step, _), norm in zip(since, norms, strict=True)]
        losses = list(self._losses)
        self._losses.clear()
        self._gradients.clear()
        bad_gradient = next((step for step, norm in noted if not math.isfinite(norm)), None)
        finite = tuple((step, norm) for step, norm in noted if math.isfinite(norm))
        if not losses:
            return Buffered(None, finite, None, bad_gradient)
        values = torch.cat([v.to(losses[0][1].device, torch.float32) for _, v, _ in losses]).cpu().double()
        lengths = [len(v) for _, v, _ in losses]
        each = torch.segment_reduce(values, "sum", lengths=torch.tensor(lengths)).tolist()
        sums, counts = dict[int, float](), dict[int, int]()  # by step, which may have been noted in parts
        for (step, _, _), whole, count in zip(losses, each, lengths, strict=True):
            sums[step], counts[step] = sums.get(step, 0.0) + whole, counts.get(step, 0) + count
        means = {step: sums[step] / counts[step] if counts[step] else math.nan for step in sorted(sums)}
        bad_loss = next((step for step, mean in means.items() if not math.isfinite(mean)), None)
        good = {step: mean for step, mean in means.items() if math.isfinite(mean)}
        summary: dict[str, Any] = {"mean": None, "max": None, "at": None, "steps": len(means)}
        if good:
            at = max(good, key=lambda step: good[step])
            summary |= {"mean": number(math.fsum(good.values()) / len(good)), "max": number(good[at]), "at": at}
        if all(times is not None for _, _, times in losses):
            times = torch.cat([t.to(losses[0][1].device, torch.float32) for _, _, t in losses if t is not None]).cpu()
            summary["bins"] = _means(values, which_bin(times, edges), len(edges) - 1)
        return Buffered(summary, finite, bad_loss, bad_gradient)


def which_bin(times: Tensor, edges: Sequence[float]) -> Tensor:
    """The bin of each timestep; what lies outside falls to the first or the last."""
    inner = torch.tensor(list(edges[1:-1]), dtype=torch.float64)
    return torch.bucketize(times.double().cpu(), inner, right=True)


def _means(values: Tensor, places: Tensor, count: int) -> list[float | None]:
    """The mean of the finite values at each place."""
    there = values.isfinite()
    if not there.all():
        values, places = values[there], places[there]
    sums, counts = places.bincount(values, minlength=count), places.bincount(minlength=count)
    return rounded((sums / counts).tolist())
