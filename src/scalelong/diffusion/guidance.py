"""Noise predictions for samplers: classifier-free guidance and clipping of the predicted image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from scalelong.diffusion.network import Network, make_conditions, null_like, predict_noise
from scalelong.diffusion.samplers import EpsFn
from scalelong.errors import InvalidValueError
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
    """ε̂ = ε̂(null) + g·(ε̂(condition) − ε̂(null))  (Ho & Salimans, 2022), with g as in diffusers.

    g = 1 is the conditional network and g = 0 the unconditional one; each makes one plain call. Any other g makes one
    call with both halves in the batch. The paper's scale s, ε̂(condition) + s·(ε̂(condition) − ε̂(null)), is g − 1.

    Args:
        y, context: labels (B,) and text tokens (B, L, D).
        null_y, null_context: the null label and the tokens of the empty prompt, as in training.
    """
    conditions = make_conditions(y, context)
    if guidance == 1.0:
        return partial(predict_noise, net, process, conditions=conditions)
    if not conditions:
        raise InvalidValueError(f"guidance must be 1 without a condition, got {guidance:g}; pass y or context")
    nulls = {"y": null_y, "context": null_context}
    null = {name: null_like(name, value, nulls[name]) for name, value in conditions.items()}
    if guidance == 0.0:
        return partial(predict_noise, net, process, conditions=null)
    both = {name: torch.cat([null[name], conditions[name]]) for name in conditions}

    def eps_fn(x: Tensor, t: Tensor) -> Tensor:
        x, t = torch.cat([x, x]), torch.cat([t, t])  # (2B, …)
        null_eps, eps = predict_noise(net, process, x, t, both).chunk(2)
        return null_eps + guidance * (eps - null_eps)

    return eps_fn


def clip_denoised(eps_fn: EpsFn, process: Process, low: float = -1.0, high: float = 1.0) -> EpsFn:
    """Clamp the predicted image x̂_0 to [low, high] and return the noise that implies it, as DDPM does for pixels."""

    def clipped(x: Tensor, t: Tensor) -> Tensor:
        x_0 = process.predict_x_0(x, eps_fn(x, t), t).clamp(low, high)
        return process.predict_eps(x, x_0, t)

    return clipped
