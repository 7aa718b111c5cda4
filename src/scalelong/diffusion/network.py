"""How a network is called, the same in training and sampling: eps = net(x, t, y=labels, context=text_tokens).

Any callable will do. A condition that is not given is not passed, so unconditional networks need no such arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.process import Process

Network = Callable[..., Tensor]
Conditions = dict[str, Tensor]  # y: (B,) labels, context: (B, L, D) text tokens


def predict_noise(net: Network, process: Process, x_t: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
    """ε̂(x_t, t): (B, …), in float32 at least. t is the process's own time."""
    eps = net(x_t, process.network_time(t).to(x_t.device), **conditions)
    if not isinstance(eps, Tensor):
        raise ScaleLongError(f"the network must return a tensor, got {type(eps).__name__}")
    if eps.shape != x_t.shape:
        raise ScaleLongError(
            f"the network must return noise of its input's shape {tuple(x_t.shape)}, got {tuple(eps.shape)}"
        )
    return eps.to(torch.promote_types(eps.dtype, torch.float32))


def given(**conditions: Tensor | None) -> Conditions:
    """The conditions that are not None."""
    return {name: value for name, value in conditions.items() if value is not None}


def null_like(name: str, condition: Tensor, null: Any) -> Tensor:
    """What stands for "no condition" (a null label; the empty prompt's tokens), for every image of `condition`."""
    if null is None:
        meaning = {"y": "the null label", "context": "the empty prompt's tokens"}.get(name, "no condition")
        raise ScaleLongError(f"dropping or guiding {name} needs null_{name}: {meaning}")
    null = torch.as_tensor(null, dtype=condition.dtype, device=condition.device)
    try:
        return null.expand_as(condition)
    except RuntimeError:
        raise ScaleLongError(
            f"null_{name} of shape {tuple(null.shape)} does not fit {name} of shape {tuple(condition.shape)}"
        ) from None


def drop_conditions(conditions: Conditions, nulls: dict[str, Any], drop: Tensor) -> Conditions:
    """Each condition replaced by its null where `drop` (B,) is true."""
    if drop.dtype != torch.bool:
        raise ScaleLongError(f"drop must be a boolean mask, got {drop.dtype}")
    return {
        name: torch.where(
            drop.to(value.device).reshape(-1, *[1] * (value.ndim - 1)), null_like(name, value, nulls.get(name)), value
        )
        for name, value in conditions.items()
    }
