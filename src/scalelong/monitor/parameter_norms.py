"""Norms over a network's parameters, block by block: gradients before clipping, and the distance to an EMA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.monitor.points import ROOT, Points
from scalelong.monitor.reading import read

ROOM = 1 << 24  # numbers that a difference may take at a time: 64 MB


@dataclass(frozen=True)
class BlockNorms:
    """The norm over all parameters, and over each block's (NaN for a block without)."""

    total: float
    blocks: list[float]
    bad: int | None = None  # the block that is not finite; of several the last, which backward meets first


class ParameterNorms:
    """Knows which block each parameter is of. Build it when the network is complete."""

    def __init__(self, root: nn.Module, points: Points) -> None:
        named = list(root.named_parameters())
        self.parameters = [parameter for _, parameter in named]
        self.names = [name for name, _ in named]
        self.places = [_place(name, points.blocks) for name in self.names]
        self.count = len(points.blocks)

    def gradients(self, scale: float = 1.0) -> BlockNorms | None:
        """‖∇‖ as it is now, divided by a loss scale. None before the first backward pass. One look at the device."""
        held = [(place, p.grad) for place, p in zip(self.places, self.parameters, strict=True) if p.grad is not None]
        if not held:
            return None
        found = self._by_block([place for place, _ in held], _norms([_dense(g) for _, g in held]))
        return BlockNorms(found.total / scale, [norm / scale for norm in found.blocks], found.bad)

    @torch.no_grad()
    def drift(self, ema: list[Tensor]) -> BlockNorms:
        """‖θ − θ̄‖/‖θ̄‖ over all parameters and over each block's, where θ̄ is the average."""
        apart, averages = _distances(self.parameters, ema), _norms(ema)
        distance, size = self._by_block(self.places, apart), self._by_block(self.places, averages)
        shares = [d / s if s else math.nan for d, s in zip(distance.blocks, size.blocks, strict=True)]
        return BlockNorms(distance.total / (size.total or math.nan), shares)

    def average_of(self, ema: Any) -> list[Tensor]:
        """The averaged parameters in the order of the network's: by name from a network, by order from a list."""
        if isinstance(ema, nn.Module):
            for holder in (ema, getattr(ema, "module", None)):  # AveragedModel and others keep it under `module`
                named = dict(holder.named_parameters()) if isinstance(holder, nn.Module) else {}
                if all(name in named for name in self.names):
                    return [named[name].detach() for name in self.names]
            raise ScaleLongError("ema has not the parameters of the network; give the averaged network itself")
        given = getattr(ema, "shadow_params", ema)  # diffusers' EMAModel
        tensors = [t for t in given if isinstance(t, Tensor)] if isinstance(given, Iterable) else []
        if [t.shape for t in tensors] != [p.shape for p in self.parameters]:
            raise ScaleLongError(
                f"ema is an averaged network or its parameters in order; this {type(ema).__name__} has "
                f"{len(tensors)} tensors that do not match the network's {len(self.parameters)} parameters"
            )
        return tensors

    def _by_block(self, places: list[int], each: list[float]) -> BlockNorms:
        """From one norm a parameter to one a block."""
        squares: list[float | None] = [None] * self.count
        for place, norm in zip(places, each, strict=True):
            squares[place] = (squares[place] or 0.0) + norm * norm
        there = [square for square in squares if square is not None]
        bad = [k for k, square in enumerate(squares) if square is not None and not math.isfinite(square)]
        blocks = [math.nan if square is None else math.sqrt(square) for square in squares]
        return BlockNorms(math.sqrt(sum(there)), blocks, bad[-1] if bad else None)


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """One norm a tensor, in as few kernels as there are devices and dtypes. One look at the device."""
    if len({(t.device, t.dtype) for t in tensors}) == 1:
        return read(torch._foreach_norm(list(tensors))).tolist()
    return read([torch.linalg.vector_norm(t) for t in tensors]).tolist()


def _distances(mine: list[nn.Parameter], theirs: list[Tensor]) -> list[float]:
    """The norms of the differences."""
    return [norm for part in _chunks(mine, theirs) for norm in _norms(torch._foreach_sub(*part))]


def _chunks(mine: list[nn.Parameter], theirs: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Both lists in parts of about `ROOM` numbers, the second on the first's devices."""
    start, count = 0, 0
    for k, parameter in enumerate(mine):
        count += parameter.numel()
        if count >= ROOM or k + 1 == len(mine):
            part = [p.detach() for p in mine[start : k + 1]]
            yield part, [a.to(p) for a, p in zip(theirs[start : k + 1], part, strict=True)]
            start, count = k + 1, 0


def _place(name: str, blocks: tuple[str, ...]) -> int:
    """The block of a parameter; the root's own come last."""
    return next((k for k, path in enumerate(blocks) if name.startswith(f"{path}.")), blocks.index(ROOT))


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
