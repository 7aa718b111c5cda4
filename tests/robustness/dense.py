"""The whole Jacobian of a small function, to check products and norms against."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def dense_jacobian(function, x: Tensor) -> Tensor:
    """∂function/∂x at `x` as a matrix (outputs, inputs)."""
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(function)(x.detach())
    return jacobian.detach().reshape(-1, x.numel())
