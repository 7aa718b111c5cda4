"""Noise predictions for samplers: a network with its conditions, classifier-free guidance, clipped predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.network import Conditions, Network, given, null_like, predict_noise
from scalelong.diffusion.samplers.contract import EpsFn
from scalelong.errors import ScaleLongError
from scalelong.process import Process


def guided(
    net: Network,
    process: Process,
    guidance: float = 1.0,
    *,
    y: Tensor | None = None,
    context: Tensor | None = None,
    null_y: Any = None,
    null_context: Any = None,
) -> EpsFn:
    """ε̂ = ε̂(null) + g·(ε̂(condition) − ε̂(null))  (Ho & Salimans, 2022), as diffusers counts guidance g.

    g = 1 is the conditional network and g = 0 the unconditional one, each with one plain call; any other g makes
    one call with both halves. The paper's scale s, ε̂(condition) + s·(ε̂(condition) − ε̂(null)), is g − 1.
    y: (B,) labels; context: (B, L, D) tokens; null_y, null_context: what the network learned as "no condition".
    """
    conditions = given(y=y, context=context)
    if guidance == 1.0:
        return _Prediction(net, process, conditions)
    if not conditions:
        raise ScaleLongError(f"guidance {guidance:g} needs a condition to guide by: y (classes) or context (text)")
    nulls = {"y": null_y, "context": null_context}
    null = {name: null_like(name, value, nulls[name]) for name, value in conditions.items()}
    if guidance == 0.0:
        return _Prediction(net, process, null)
    both = {name: torch.cat([null[name], conditions[name]]) for name in conditions}
    return _Guided(_Prediction(net, process, both), guidance)


def clip_denoised(eps_fn: EpsFn, process: Process, low: float = -1.0, high: float = 1.0) -> EpsFn:
    """The prediction whose image x̂_0 (Eq. 1 solved) is clamped to [low, high] first, as DDPM does for pixels."""

    def clipped(x: Tensor, t: Tensor) -> Tensor:
        x_0 = process.predict_x_0(x, eps_fn(x, t), t).clamp(low, high)
        return process.predict_eps(x, x_0, t)

    return clipped


class _Prediction:
    def __init__(self, net: Network, process: Process, conditions: Conditions) -> None:
        self.net, self.process, self.conditions = net, process, conditions

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return predict_noise(self.net, self.process, x, t, self.conditions)


class _Guided:
    def __init__(self, both: _Prediction, guidance: float) -> None:
        self.both, self.guidance = both, guidance

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        without, with_ = self.both(torch.cat([x, x]), torch.cat([t, t])).chunk(2)  # (2B, …) → 2 × (B, …)
        return without + self.guidance * (with_ - without)
