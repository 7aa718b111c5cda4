"""The exponential moving average of a network: a copy of it, updated parameter by parameter of the same name."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """θ̄ ← d·θ̄ + (1 − d)·θ; buffers are copied. `net` is a whole network, scaling included, in eval mode."""

    def __init__(self, net: nn.Module, decay: float, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        averaged = dict(self.net.named_parameters())
        live = dict(net.named_parameters())
        assert averaged.keys() == live.keys()
        self._averaged: list[Tensor] = [averaged[name] for name in live]
        self._live: list[Tensor] = [live[name] for name in live]
        self._buffers = [(dict(self.net.named_buffers())[name], buffer) for name, buffer in net.named_buffers()]

    def decay_at(self, update: int) -> float:
        """d of update number `update` (from 1): constant, or min(d, (1 + u)/(10 + u)) with a warm-up."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, update: int) -> None:
        torch._foreach_lerp_(self._averaged, self._live, 1.0 - self.decay_at(update))
        for mine, theirs in self._buffers:
            mine.copy_(theirs)
