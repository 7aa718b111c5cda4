"""The calling convention of training and sampling: `eps = net(x, t, y=labels, context=text_tokens)`.

Any callable works. A condition that is None is not passed, so unconditional networks need no such arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import InvalidValueError, invalid
from scalelong.process import Process

Network = Callable[..., Tensor]
Conditions = dict[str, Tensor]  # y: (B,) labels, context: (B, L, D) text tokens


class Denoiser(nn.Module):
    """Adapts a network to `eps = net(x, t, y=, context=)`.

    Supports U-ViT, diffusers' `UNet2DModel` and `UNet2DConditionModel`, and any network with U-ViT's arguments,
    also inside DDP or `torch.compile`.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        inner = getattr(net, "module", getattr(net, "_orig_mod", net))  # DDP, torch.compile
        self.accepted = set(inspect.signature(inner.forward).parameters)
        self.diffusers = {"sample", "timestep"} <= self.accepted
        names = ("class_labels", "encoder_hidden_states") if self.diffusers else ("y", "context")
        self.argument_names = dict(zip(("y", "context"), names, strict=True))

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        arguments = self.arguments(y, context)
        if self.diffusers:
            return self.net(x, t, **arguments, return_dict=False)[0]
        return self.net(x, t, **arguments)

    def arguments(self, y: Tensor | None = None, context: Tensor | None = None) -> Conditions:
        """Return the conditions under the names of the network's own arguments."""
        arguments = {}
        for name, value in make_conditions(y, context).items():
            argument = self.argument_names[name]
            if argument not in self.accepted:
                raise InvalidValueError(
                    f"{type(self.net).__name__}.forward has no argument {argument!r}, but {name} was passed; "
                    "use a network built for this condition"
                )
            arguments[argument] = value
        return arguments


def make_conditions(y: Tensor | None = None, context: Tensor | None = None) -> Conditions:
    """Collect the conditions that are not None."""
    return {name: value for name, value in (("y", y), ("context", context)) if value is not None}


def predict_noise(net: Network, process: Process, x_t: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
    """ε̂(x_t, t): (B, …), at least float32. t is in the process's own time."""
    eps = net(x_t, process.network_time(t).to(x_t.device), **conditions)
    if not isinstance(eps, Tensor):
        raise invalid("the network's output", "a tensor", type(eps).__name__, "wrap it in Denoiser, or unpack it")
    if eps.shape != x_t.shape:
        raise invalid("the network's output shape", f"its input's, {tuple(x_t.shape)}", tuple(eps.shape))
    return eps.to(torch.promote_types(eps.dtype, torch.float32))


def null_like(name: str, condition: Tensor, null: Any) -> Tensor:
    """Expand the null condition (null label, tokens of the empty prompt) to the shape of `condition`."""
    if null is None:
        meaning = {"y": "the null label", "context": "the tokens of the empty prompt"}[name]
        raise invalid(f"null_{name}", meaning, None, f"dropping or guiding {name} needs it")
    null = torch.as_tensor(null, dtype=condition.dtype, device=condition.device)
    try:
        return null.expand_as(condition)
    except RuntimeError:
        expected = f"broadcastable to {name}'s shape {tuple(condition.shape)}"
        raise invalid(f"null_{name}", expected, tuple(null.shape)) from None


def drop_conditions(conditions: Conditions, nulls: dict[str, Any], drop: Tensor) -> Conditions:
    """Replace each condition by its null where the mask `drop` (B,) is true."""
    if drop.dtype != torch.bool:
        raise invalid("drop", "a boolean mask (B,)", drop.dtype)
    return {
        name: torch.where(
            drop.to(value.device).reshape(-1, *[1] * (value.ndim - 1)), null_like(name, value, nulls.get(name)), value
        )
        for name, value in conditions.items()
    }
