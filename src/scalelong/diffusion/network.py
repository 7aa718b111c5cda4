"""How training and sampling call a network: `net(x, t, y=labels, context=text_tokens)`, the loss, and guidance.

Any callable works. A condition that is None is not passed, so unconditional networks need no such arguments.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.diffusion.samplers import PredictFn, both
from scalelong.errors import InvalidValueError, invalid
from scalelong.objective import Denoised, Objective, get_objective
from scalelong.process import Interpolant, like

Network = Callable[..., Tensor]
Spec = Interpolant | Objective  # a process means noise prediction on it
Conditions = dict[str, Tensor]  # y: (B,) labels, context: (B, L, D) text tokens


class Denoiser(nn.Module):
    """Adapts a network to `output = net(x, t, y=, context=)`.

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
        for argument in (name for name in arguments if name not in self.accepted):
            called, hint = f"{type(self.net).__name__}.forward", "use a network built for this condition"
            raise InvalidValueError(f"{called} has no argument {argument!r}, but a value was passed; {hint}")
        return arguments


def make_conditions(y: Tensor | None = None, context: Tensor | None = None) -> Conditions:
    """Collect the conditions that are not None."""
    return {name: value for name, value in (("y", y), ("context", context)) if value is not None}


def predict(
    net: Network, objective: Objective, x_t: Tensor, t: Tensor, conditions: Conditions, extra: Tensor | None = None
) -> Tensor:
    """The network's output F̂ at x_t and t: (B, …), at least float32. t is in the process's own time.

    `extra` is added to the network's input.
    """
    x, time = objective.network_inputs(x_t, t)
    output = net(x if extra is None else x + extra, time, **conditions)
    if not isinstance(output, Tensor):
        raise invalid("the network's output", "a tensor", type(output).__name__, "wrap it in Denoiser, or unpack it")
    if output.shape != x_t.shape:
        raise invalid("the network's output shape", f"its input's, {tuple(x_t.shape)}", tuple(output.shape))
    return output.to(torch.promote_types(output.dtype, torch.float32))


def predict_noise(
    net: Network, objective: Spec, x_t: Tensor, t: Tensor, conditions: Conditions, extra: Tensor | None = None
) -> Tensor:
    """ε̂(x_t, t), whatever the network predicts: (B, …), at least float32."""
    objective = get_objective(objective)
    return objective.noise(x_t, predict(net, objective, x_t, t, conditions, extra), t)


def null_like(name: str, condition: Tensor, null: Any) -> Tensor:
    """Expand the null condition (null label, tokens of the empty prompt) to the shape of `condition`."""
    if null is None:
        expected = "the null label or the tokens of the empty prompt"
        raise invalid(f"null_{name}", expected, None, f"dropping or guiding {name} needs it")
    if isinstance(null, int):  # filled on the device: a copy of the number would wait for it at every step
        return torch.full_like(condition, null)
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
    objective: Spec,
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
    """w(t)·‖F − F̂(x_t, t)‖² of the objective as a mean over elements, per sample: (B,).

    For a process, or objective "eps", this is the paper's L_simple = E‖ε − ε̂(x_t, t)‖² (Eq. 2), with x_t of Eq. 1.
    The function draws nothing: t, eps and drop are arguments, so the loss is a deterministic function of them.

    Args:
        objective: what the network predicts; a process means noise prediction on it.
        x_0: images, (B, …).
        eps: noise, (B, …).
        t: times in the process's own unit, (B,).
        y: labels, (B,).
        context: text tokens, (B, L, D).
        drop: boolean mask (B,) of samples whose conditions become null, for classifier-free guidance.
        null_y: the null label.
        null_context: tokens of the empty prompt.
        extra: noise added to the network's input but not to the target, (B, …), as in Fig. 3c.
    """
    objective = get_objective(objective)
    conditions = drop_conditions(make_conditions(y, context), drop, {"y": null_y, "context": null_context})
    x_t = objective.process.add_noise(x_0, eps, t)
    predicted = predict(net, objective, x_t, t, conditions, extra)
    losses = (objective.target_of(x_0, eps, t) - predicted).square().flatten(1).mean(1)
    weights = objective.loss_weights(t)
    return losses if weights is None else like(weights, losses) * losses


def guided(
    net: Network,
    objective: Spec,
    guidance: float = 1.0,
    *,
    y: Tensor | None = None,
    context: Tensor | None = None,
    null_y: Any = None,
    null_context: Any = None,
) -> PredictFn:
    """F̂ = F̂(null) + g·(F̂(condition) − F̂(null))  (Ho & Salimans, 2022), with g as in diffusers.

    x̂_0 and ε̂ are affine in F̂, so guiding one guides all of them. The result predicts ε̂ for noise prediction, and both
    x̂_0 and ε̂ (`Denoised`) for every other objective. g = 1 is the conditional network and g = 0 the unconditional
    one; each makes one plain call. Any other g makes one call with both halves in the batch. The paper's scale s,
    ε̂(condition) + s·(ε̂(condition) − ε̂(null)), is g − 1.

    Args:
        objective: what the network predicts; a process means noise prediction on it.
        y: labels, (B,).
        context: text tokens, (B, L, D).
        null_y: the null label, as in training.
        null_context: tokens of the empty prompt, as in training.
    """
    objective = get_objective(objective)
    output = _guided_output(
        net, objective, guidance, make_conditions(y, context), {"y": null_y, "context": null_context}
    )
    if objective.name == "eps":  # samplers form x̂_0 with the coefficients of their own steps
        # Where α(t_max) = 0, x_t there is the noise and ε̂ = x_t says nothing of x_0; at t_start it does.
        return lambda x, t: output(x, t.clamp(max=objective.process.t_start))
    return lambda x, t: objective.denoised(x, output(x, t), t)


def _guided_output(
    net: Network, objective: Objective, guidance: float, conditions: Conditions, nulls: dict[str, Any]
) -> Callable[[Tensor, Tensor], Tensor]:
    if guidance == 1.0:
        return partial(predict, net, objective, conditions=conditions)
    if not conditions:
        raise InvalidValueError(f"guidance must be 1 without a condition, got {guidance:g}; pass y or context")
    null = {name: null_like(name, value, nulls[name]) for name, value in conditions.items()}
    if guidance == 0.0:
        return partial(predict, net, objective, conditions=null)
    pairs = {name: torch.cat([null[name], conditions[name]]) for name in conditions}

    def output(x: Tensor, t: Tensor) -> Tensor:
        x, t = torch.cat([x, x]), torch.cat([t, t])  # (2B, …)
        without, conditional = predict(net, objective, x, t, pairs).chunk(2)
        return without + guidance * (conditional - without)

    return output


def clip_denoised(predict_fn: PredictFn, process: Interpolant, low: float = -1.0, high: float = 1.0) -> PredictFn:
    """Clamp the predicted image x̂_0 to [low, high] and return the noise that implies it, as DDPM does for pixels."""

    def clipped(x: Tensor, t: Tensor) -> Tensor | Denoised:
        predicted = predict_fn(x, t)
        x_0 = both(predicted, x, t, process).x_0.clamp(low, high)
        if isinstance(predicted, Denoised):
            return Denoised(x_0, process.predict_eps(x, x_0, t))
        return process.predict_eps(x, x_0, t.clamp(max=process.t_start))  # the inverse of predict_x_0

    return clipped
