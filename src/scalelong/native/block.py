"""A whole pre-norm transformer block as one call into the kernels, forwards and backwards.

    y = x + proj(attention(qkv(norm1(x)))),   z = y + fc2(GELU(fc1(norm2(y))))

A small network spends a third of its step between operators: views, transpositions, allocations, nodes of the graph.
Here a block is one node of the graph, and between its matrix products, which are those of the library that torch has,
nothing is left but the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.native.attention import LONGEST
from scalelong.native.library import has_products, library, pointers, usable

QKV_BIAS = 3  # the place of the one parameter that may be missing


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
    there = [p for p in parameters if p is not None]
    missing = len(parameters) - len(there)
    if x.ndim != 3 or not x.numel() or missing > (parameters[QKV_BIAS] is None) or torch.is_autocast_enabled("cpu"):
        return False
    loaded = library() if usable(x, *there) else None
    width = x.shape[2] // heads
    return loaded is not None and has_products() and x.shape[1] <= LONGEST and width % loaded.width() == 0


def block(x: Tensor, shape: Shape, *parameters: Tensor | None) -> Tensor:
    """(B, L, D) → (B, L, D). parameters: weight and bias of norm1, qkv, proj, norm2, fc1, fc2, in this order."""
    if torch.is_grad_enabled() and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters)):
        return _Block.apply(x, shape, *parameters)
    return _forward(x, shape, parameters, keep=False)[0]


def _forward(x: Tensor, shape: Shape, parameters: tuple[Tensor | None, ...], keep: bool) -> tuple[Tensor, Tensor]:
    """The result, and what the backward pass needs where that is to be kept."""
    loaded = library()
    assert loaded is not None
    B, L, D = x.shape
    sizes, threads = (B, L, D, len(parameters[9]), shape.heads), torch.get_num_threads()  # type: ignore[arg-type]
    kept, z = x.new_empty(loaded.block_keeps(*sizes, keep, threads)), torch.empty_like(x)
    places = x.data_ptr(), pointers(parameters), kept.data_ptr(), z.data_ptr()
    loaded.block_forward(*places, *sizes, shape.eps1, shape.eps2, keep, threads)
    return z, kept


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Shape, *parameters: Tensor | None) -> Tensor:
        z, kept = _forward(x, shape, parameters, keep=True)
        ctx.shape = shape
        ctx.save_for_backward(x, kept, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (g,), (x, kept, *parameters) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not usable(g := g.contiguous()):
            return _again(ctx, x, parameters, g)
        loaded = library()
        assert loaded is not None
        B, L, D = x.shape
        hidden = len(parameters[9])
        threads = torch.get_num_threads()
        room, dx = x.new_empty(loaded.block_room(B, L, D, hidden, threads)), torch.empty_like(x)
        needs = ctx.needs_input_grad[2:]
        found = [torch.empty_like(p) if needed else None for p, needed in zip(parameters, needs, strict=True)]
        places = g.data_ptr(), x.data_ptr(), pointers(parameters), kept.data_ptr(), room.data_ptr(), dx.data_ptr()
        loaded.block_backward(*places, pointers(found), B, L, D, hidden, ctx.shape.heads, threads)
        return dx, None, *found


def _again(ctx: Any, x: Tensor, parameters: list[Tensor | None], g: Tensor) -> tuple[Tensor | None, ...]:
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
