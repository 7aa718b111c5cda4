"""What follows the gradient: clipping, AdamW, the average of the weights, each one call over all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_double
from typing import Any

import torch
from torch import Tensor

from scalelong.native.library import library, pointers, sizes, usable


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], limit: float) -> Tensor | None:
    """Scale the gradients to a norm of at most `limit`, as torch does; the norm before. None: not possible here."""
    loaded = library() if gradients and usable(*gradients) else None
    if loaded is None:
        return None
    counts, places, each = sizes(gradients), pointers(gradients), (c_double * len(gradients))()
    whole = loaded.squares(len(gradients), counts, places, None, each, None)
    norm = torch.tensor(whole, dtype=torch.float64).sqrt().float()
    factor = limit / (norm.item() + 1e-6)
    if not factor >= 1.0:  # NaN too
        loaded.scale(len(gradients), counts, places, factor)
    return norm


def norms(tensors: Sequence[Tensor]) -> list[float] | None:
    """The norm of every tensor. None: not possible here."""
    loaded = library() if tensors and usable(*tensors) else None
    if loaded is None:
        return None
    each = (c_double * len(tensors))()
    loaded.squares(len(tensors), sizes(tensors), pointers(tensors), None, each, None)
    return [math.sqrt(square) for square in each]


def distances(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[float], list[float]] | None:
    """The norm of every difference, and of every other. None: not possible here."""
    loaded = library() if tensors and usable(*tensors, *others) else None
    if loaded is None:
        return None
    each, theirs = (c_double * len(tensors))(), (c_double * len(tensors))()
    loaded.squares(len(tensors), sizes(tensors), pointers(tensors), pointers(others), each, theirs)
    return [math.sqrt(square) for square in each], [math.sqrt(square) for square in theirs]


@torch.no_grad()
def average_(means: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """mean ← mean + weight·(value − mean), tensor by tensor."""
    loaded = library() if means and usable(*means, *values) else None
    if loaded is None:
        torch._foreach_lerp_(list(means), list(values), weight)
    else:
        loaded.average(len(means), sizes(means), pointers(means), pointers(values), weight)


class AdamW(torch.optim.AdamW):
    """torch's, whose state it keeps. The first step, which makes that state, is torch's own."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        work = None if closure is not None else [self._work(group) for group in self.param_groups]
        if work is None or None in work:
            return super().step(closure)
        for group in work:
            assert group is not None
            self._update(*group)
        return None

    def _work(self, group: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor], list[Any]] | None:
        """A group's settings, parameters and states, where the kernel can take them."""
        if any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable")):
            return None
        if getattr(self, "grad_scale", None) is not None or isinstance(group["lr"], Tensor):
            return None
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state.get(p, {}) for p in parameters]
        if not all("step" in state for state in states) or len({float(state["step"]) for state in states}) > 1:
            return None
        held = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        gradients = [p.grad for p in parameters]
        return (group, parameters, states) if usable(*parameters, *gradients, *held) else None

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameters: list[Tensor], states: list[Any]) -> None:
        loaded = library()
        if not parameters or loaded is None:
            return
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        n, lr, (beta1, beta2) = float(steps[0]), group["lr"], group["betas"]
        loaded.adamw(
            len(parameters),
            sizes(parameters),
            pointers(parameters),
            pointers([p.grad for p in parameters if p.grad is not None]),
            pointers([state["exp_avg"] for state in states]),
            pointers([state["exp_avg_sq"] for state in states]),
            1 - lr * group["weight_decay"],
            lr / (1 - beta1**n),
            (1 - beta2**n) ** 0.5,
            beta1,
            beta2,
            group["eps"],
        )
