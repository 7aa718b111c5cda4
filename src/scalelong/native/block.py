"""A whole pre-norm transformer block as one operation: torch's products, the kernels, and nothing between them.

    y = x + proj(attention(qkv(norm1(x)))),   z = y + fc2(GELU(fc1(norm2(y))))

A small network spends a third of its step between operators: views, transpositions, nodes of the graph. Here a block is
one node, the residuals are added in place, and the gradients of its twelve or thirteen parameters come out together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.native.attention import LONGEST, attend, attend_backward
from scalelong.native.gelu import gelu, gelu_backward
from scalelong.native.library import library, usable

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_GRADIENTS = [True, True, True]  # of the input, the weight and the bias


@dataclass(frozen=True)
class Shape:
    """What is no tensor. `plain` is the block in torch's operators, for gradients of gradients."""

    heads: int
    eps1: float
    eps2: float
    plain: Callable[[Tensor], Tensor]


def untouched(*modules: nn.Module) -> bool:
    """Whether calling these modules is nothing but their forward: no hook, no other forward put in its place."""
    if torch.nn.modules.module._has_any_global_hook():
        return False
    for module in modules:
        held = module.__dict__
        if (
            held["_forward_hooks"]
            or held["_forward_pre_hooks"]
            or held["_backward_hooks"]
            or held["_backward_pre_hooks"]
            or "forward" in held
        ):
            return False
    return True


def possible(x: Tensor, heads: int, *parameters: Tensor | None) -> bool:
    """Whether `block` can take these: float32 on the CPU, no autocast, few tokens, heads of a width the kernel has."""
    if x.ndim != 3 or not usable(x, *[p for p in parameters if p is not None]) or torch.is_autocast_enabled("cpu"):
        return False
    loaded = library()
    width = x.shape[2] // heads
    return loaded is not None and x.shape[1] <= LONGEST and width % loaded.width() == 0


def block(x: Tensor, shape: Shape, *parameters: Tensor | None) -> Tensor:
    """(B, L, D) → (B, L, D). parameters: weight and bias of norm1, qkv, proj, norm2, fc1, fc2, in this order."""
    if torch.is_grad_enabled() and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters)):
        return _Block.apply(x, shape, *parameters)
    return _forward(x, shape, parameters)[0]


def _forward(x: Tensor, shape: Shape, parameters: tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor]]:
    """The result, and what the backward pass needs."""
    n1w, n1b, qkvw, qkvb, projw, projb, n2w, n2b, fc1w, fc1b, fc2w, fc2b = parameters
    loaded = library()
    assert loaded is not None
    assert isinstance(qkvw, Tensor) and isinstance(projw, Tensor)  # noqa: PT018
    assert isinstance(fc1w, Tensor) and isinstance(fc2w, Tensor)  # noqa: PT018
    B, L, D = x.shape
    rows = x.view(B * L, D)
    normed1, mean1, rstd1 = torch.native_layer_norm(rows, [D], n1w, n1b, shape.eps1)
    qkv = torch.mm(normed1, qkvw.t()) if qkvb is None else torch.addmm(qkvb, normed1, qkvw.t())
    attended, logs = attend(loaded, qkv.view(B, L, 3 * D), shape.heads)
    y = torch.addmm(projb, attended.view(B * L, D), projw.t()).add_(rows)  # type: ignore[arg-type]
    normed2 = torch.native_layer_norm(y, [D], n2w, n2b, shape.eps2)[0]
    inner = torch.addmm(fc1b, normed2, fc1w.t())  # type: ignore[arg-type]
    active = gelu(inner)
    z = torch.addmm(fc2b, active, fc2w.t()).add_(y)  # type: ignore[arg-type]
    # norm2's result is worked out again: what a block keeps is freed only when all of it is done
    kept = [x, normed1, mean1, rstd1, qkv, attended, logs, y, inner, active]
    return z.view(B, L, D), kept


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Shape, *parameters: Tensor | None) -> Tensor:
        z, kept = _forward(x, shape, parameters)
        ctx.shape = shape
        ctx.save_for_backward(*kept, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,), saved = gradients, ctx.saved_tensors
        x, parameters = saved[0], saved[10:]
        if torch.is_grad_enabled() or not usable(g := g.contiguous()):
            return _again(ctx, x, parameters, g)
        _, normed1, mean1, rstd1, qkv, attended, logs, y, inner, active = saved[:10]
        n1w, n1b, qkvw, qkvb, projw, _, n2w, n2b, fc1w, _, fc2w, _ = parameters
        needs = ctx.needs_input_grad[2:]
        B, L, D = x.shape
        g = g.view(B * L, D)
        fc2 = _linear(g, active, needs[10:])
        back = torch.mm(g, fc2w)
        gelu_backward(back, inner, back)
        normed2, mean2, rstd2 = torch.native_layer_norm(y, [D], n2w, n2b, ctx.shape.eps2)
        fc1 = _linear(back, normed2, needs[8:])
        dy, *norm2 = _layer_norm_backward(torch.mm(back, fc1w), y, [D], mean2, rstd2, n2w, n2b, _GRADIENTS)
        dy.add_(g)
        proj = _linear(dy, attended.view(B * L, D), needs[4:])
        dqkv = attend_backward(torch.mm(dy, projw), qkv, attended, logs).view(B * L, 3 * D)
        first = _linear(dqkv, normed1, (needs[2], qkvb is not None and needs[3]))
        rows = x.view(B * L, D)
        dx, *norm1 = _layer_norm_backward(torch.mm(dqkv, qkvw), rows, [D], mean1, rstd1, n1w, n1b, _GRADIENTS)
        return dx.add_(dy).view(B, L, D), None, *norm1, *first, *proj, *norm2, *fc1, *fc2


def _linear(g: Tensor, x: Tensor, needs: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a linear layer's weight and bias."""
    return torch.mm(g.t(), x) if needs[0] else None, g.sum(0) if needs[1] else None


def _again(ctx: Any, x: Tensor, parameters: tuple[Tensor | None, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    """A gradient that can be differentiated itself: the block once more, in torch's operators."""
    inputs = [x, *parameters]
    wanted = [k for k, tensor in enumerate(inputs) if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        z = ctx.shape.plain(x)
        found = torch.autograd.grad(z, [inputs[k] for k in wanted], g, create_graph=True)  # type: ignore[arg-type]
    whole: list[Tensor | None] = [None] * len(inputs)
    for k, value in zip(wanted, found, strict=True):
        whole[k] = value
    return whole[0], None, *whole[1:]
