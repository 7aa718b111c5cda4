"""How training and sampling call a network: `eps = net(x, t, y=labels, context=text_tokens)`, the loss, and guidance.

Any callable works. A condition that is None is not passed, so unconditional networks need no such arguments.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.diffusion.samplers import EpsFn
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
        return self.net(x, t, **arguments, return_dict=False)[0] if self.diffusers else self.net(x, t, **arguments)

    def arguments(self, y: Tensor | None = None, context: Tensor | None = None) -> Conditions:
        """Return the conditions under the names of the network's own arguments."""
        arguments = {self.argument_names[name]: value for name, value in make_conditions(y, context).items()}
        for argument in arguments.keys() - self.accepted:
            called, hint = f"{type(self.net).__name__}.forward", "use a network built for this condition"
            raise InvalidValueError(f"{called} has no argument {argument!r}, but a value was passed; {hint}")
        return arguments


def make_conditions(y: Tensor | None = None, context: Tensor | None = None) -> Conditions:
    """Collect the conditions that are not None."""
    return {name: value for name, value in (("y", y), ("context", context)) if value is not None}


def predict_noise(
    net: Network, process: Process, x_t: Tensor, t: Tensor, conditions: Conditions, extra: Tensor | None = None
) -> Tensor:
    """ε̂(x_t + extra, t): (B, …), at least float32. t is in the process's own time."""
    x_t = x_t if extra is None else x_t + extra
    eps = net(x_t, process.network_time(t).to(x_t.device), **conditions)
    if not isinstance(eps, Tensor):
        raise invalid("the network's output", "a tensor", type(eps).__name__, "wrap it in Denoiser, or unpack it")
    if eps.shape != x_t.shape:
        raise invalid("the network's output shape", f"its input's, {tuple(x_t.shape)}", tuple(eps.shape))
    return eps.to(torch.promote_types(eps.dtype, torch.float32))


def null_like(name: str, condition: Tensor, null: Any) -> Tensor:
    """Expand the null condition (null label, tokens of the empty prompt) to the shape of `condition`."""
    if null is None:
        expected = "the null label or the tokens of the empty prompt"
        raise invalid(f"null_{name}", expected, None, f"dropping or guiding {name} needs it")
    null = torch.as_tensor(null, dtype=condition.dtype, device=condition.device)
    try:
        return null.expand_as(condition)
    except RuntimeError:
        expected = f"broadcastable to {name}'s shape {tuple(condition.shape)}"
        raise invalid(f"null_{name}", expected, tuple(null.shape)) from None


def drop_conditions(conditions: Conditions, drop: Tensor | None, nulls: dict[str, Any]) -> Conditions:
    """Replace the conditions of samples where `drop` (B,) is true by null ones, for classifier-free guidance."""
    if drop is None:
        return conditions
    if drop.dtype != torch.bool:
        raise invalid("drop", "a boolean mask (B,)", drop.dtype)
    dropped = {}
    for name, value in conditions.items():
        mask = drop.to(value.device).reshape(-1, *[1] * (value.ndim - 1))
        dropped[name] = torch.where(mask, null_like(name, value, nulls[name]), value)
    return dropped


def simple_loss(
    net: Network,
    process: Process,
    x_0: Tensor,
    t: Tensor,
    eps: Tensor,
    *,
    y: Tensor | None = None,
    context: Tensor | None = None,
    drop: Tensor | None = None,
    null_y: int | Tensor | None = None,
    null_context: Tensor | None = None,
    extra: Tensor | None = None,
) -> Tensor:
    """L_simple = E‖ε − ε̂(x_t, t)‖² with x_t of Eq. 1 (Eq. 2, as a mean over elements), per sample: (B,).

    The function draws nothing: t, eps and drop are arguments, so the loss is a deterministic function of them.

    Args:
        x_0, eps: images and noise, (B, …).
        t: times in the process's own unit, (B,).
        y, context: labels (B,) and text tokens (B, L, D).
        drop: boolean mask (B,) of samples whose conditions become null, for classifier-free guidance.
        null_y, null_context: the null label and the tokens of the empty prompt.
        extra: noise added to the network's input but not to the target, (B, …), as in Fig. 3c.
    """
    conditions = drop_conditions(make_conditions(y, context), drop, {"y": null_y, "context": null_context})
    x_t = process.add_noise(x_0, eps, t)
    predicted = predict_noise(net, process, x_t, t, conditions, extra)
    return (eps - predicted).square().flatten(1).mean(1)


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
