"""Self-attention over few tokens."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from scalelong.native.library import library, usable

LONGEST = 320  # tokens: a head's scores must stay in the cache; measured up to 257


def attention(qkv: Tensor, heads: int) -> Tensor:
    """softmax(q·kᵀ/√d)·v of every head: (B, L, 3D) → (B, L, D), q, k and v beside each other, heads inside."""
    loaded = library() if usable(qkv) else None
    if loaded is not None and qkv.shape[1] <= LONGEST and (qkv.shape[2] // 3 // heads) % loaded.width() == 0:
        if torch.is_grad_enabled() and qkv.requires_grad:
            return _Attention.apply(qkv, heads)
        return attend(loaded, qkv, heads)[0]
    return by_torch(qkv, heads)


def by_torch(qkv: Tensor, heads: int) -> Tensor:
    B, L, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(B, L, 3, heads, D // heads).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, L, D / heads) each
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, L, D)


def by_formula(qkv: Tensor, heads: int) -> Tensor:
    """The same in operators that can be differentiated any number of times, which torch's fused kernel cannot."""
    B, L, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(B, L, 3, heads, D // heads).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (q @ k.transpose(-1, -2) * (D // heads) ** -0.5).softmax(-1)  # (B, heads, L, L)
    return (weights @ v).transpose(1, 2).reshape(B, L, D)


def attend(loaded: CDLL, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp of each row of scores, (B, heads, L)."""
    B, L, D = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out, logs = qkv.new_empty(B, L, D), qkv.new_empty(B, heads, L)
    places = [tensor.data_ptr() for tensor in (qkv, out, logs)]
    loaded.attention_forward(*places, B, L, heads, D // heads, torch.get_num_threads())
    return out, logs


class _Attention(torch.autograd.Function):
    """No copies of q, k, v, and none of the probabilities: the backward pass works them out again."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        loaded = library()
        assert loaded is not None
        out, logs = attend(loaded, qkv, heads)
        ctx.heads = heads
        ctx.save_for_backward(qkv, out, logs)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> tuple[Tensor, None]:
        (g,) = gradients
        qkv, out, logs = ctx.saved_tensors  # type: ignore[attr-defined]
        heads = ctx.heads  # type: ignore[attr-defined]
        if torch.is_grad_enabled() or not usable(g := g.contiguous()):  # a gradient of the gradient is asked for
            with torch.enable_grad():
                return torch.autograd.grad(by_formula(qkv, heads), qkv, g, create_graph=True)[0], None
        return attend_backward(g, qkv, out, logs), None


def attend_backward(g: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    loaded = library()
    assert loaded is not None
    B, L, D = out.shape
    heads, back = logs.shape[1], torch.empty_like(qkv)
    places = [tensor.data_ptr() for tensor in (g, qkv, out, logs, back)]
    loaded.attention_backward(*places, B, L, heads, D // heads, torch.get_num_threads())
    return back
