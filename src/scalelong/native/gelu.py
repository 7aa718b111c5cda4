"""The exact GELU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.native.library import library, usable


class GELU(nn.GELU):
    """torch's, by a kernel where that may be used: x·Φ(x), with an error of the size of torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        if self.approximate != "none" or not usable(input):
            return super().forward(input)
        if torch.is_grad_enabled() and input.requires_grad:
            return _Gelu.apply(input)
        return gelu(input)


def gelu(x: Tensor) -> Tensor:
    loaded = library()
    assert loaded is not None
    y = torch.empty_like(x)
    loaded.gelu_forward(x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
    return y


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (g,), (x,) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled() or not usable(g := g.contiguous()):  # a gradient of the gradient is asked for
            with torch.enable_grad():
                return torch.autograd.grad(F.gelu(x), x, g, create_graph=True)[0]
        return gelu_backward(g, x, torch.empty_like(x))


def gelu_backward(g: Tensor, x: Tensor, back: Tensor) -> Tensor:
    """Into `back`, which may be g itself."""
    loaded = library()
    assert loaded is not None
    loaded.gelu_backward(g.data_ptr(), x.data_ptr(), back.data_ptr(), x.numel(), torch.get_num_threads())
    return back
