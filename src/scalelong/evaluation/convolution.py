"""The one layer that the pretrained extractors are made of: convolution, BatchNorm and activation, folded into one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["none", "relu", "relu6"]


class FoldedConv(nn.Module):
    """y = activation(weight ∗ x + bias), the weight channels last, which is what oneDNN and cuDNN are fastest at."""

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        groups: int = 1,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", bias.contiguous())
        self.stride, self.padding, self.groups, self.activation = stride, padding, groups, activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, 1, self.groups)
        if self.activation == "relu":
            return F.relu_(x)
        return F.hardtanh_(x, 0.0, 6.0) if self.activation == "relu6" else x


def fold(
    weight: Tensor, shift: Tensor, mean: Tensor, var: Tensor, scale: Tensor | None = None, eps: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """A convolution and the inference-time BatchNorm after it as the (weight, bias) of one convolution.

    In float64, so that folding adds no more than the final rounding.
    """
    factor = (var.double() + eps).rsqrt()  # (out,)
    if scale is not None:
        factor = factor * scale.double()
    return (weight.double() * factor.view(-1, 1, 1, 1)).float(), (shift.double() - mean.double() * factor).float()
