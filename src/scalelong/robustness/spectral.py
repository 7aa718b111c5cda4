"""Spectral norms of Jacobians by power iteration on Jacobian–vector products; no Jacobian is formed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scalelong.errors import ScaleLongError

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SpectralNorm:
    """The largest singular value found. Power iteration comes from below: the true norm is never smaller."""

    value: float
    iterations: int
    converged: bool


class Jacobian:
    """∂target/∂source of two tensors in one graph, as the products Jv and Jᵀu.

    Jᵀu is a gradient. It is linear in u, so its own gradient with respect to u gives Jv: reverse mode twice, which
    works wherever a second derivative does and runs the function only once.
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        self._u = torch.zeros_like(target, requires_grad=True)
        self._pulled: Tensor | None = None
        if target.requires_grad:
            (self._pulled,) = torch.autograd.grad(target, source, self._u, create_graph=True, allow_unused=True)

    def transposed_times(self, u: Tensor) -> Tensor:
        if self._pulled is None:  # the target does not depend on the source
            return torch.zeros_like(self.source)
        (pulled,) = torch.autograd.grad(self.target, self.source, u, retain_graph=True)
        return pulled

    def times(self, v: Tensor) -> Tensor:
        pushed = None
        if self._pulled is not None and self._pulled.requires_grad:
            (pushed,) = torch.autograd.grad(self._pulled, self._u, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self.target) if pushed is None else pushed


def second_derivatives() -> AbstractContextManager[None]:
    """Attention by plain matrix products: the fused kernels have no second derivative."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


def power_iteration(
    multiply: Linear, transpose: Linear, start: Tensor, iterations: int = 200, tolerance: float = 1e-5
) -> SpectralNorm:
    """‖A‖₂ from v ↦ Av and u ↦ Aᵀu, beginning at `start`, until ‖Av‖ changes by less than `tolerance` of itself."""
    if iterations < 1:
        raise ScaleLongError(f"iterations is {iterations}; it must be at least 1")
    v = start / start.norm()
    value = 0.0
    for done in range(1, iterations + 1):
        u = multiply(v)
        before, value = value, float(u.norm())
        if value == 0.0 or not torch.isfinite(u).all():
            return SpectralNorm(value, done, converged=value == 0.0)
        if abs(value - before) <= tolerance * value:
            return SpectralNorm(value, done, converged=True)
        v = transpose(u)
        length = v.norm()
        if length == 0:
            return SpectralNorm(value, done, converged=True)
        v = v / length
    return SpectralNorm(value, iterations, converged=False)


def spectral_norm(
    function: Linear, x: Tensor, iterations: int = 200, tolerance: float = 1e-5, seed: int = 0
) -> SpectralNorm:
    """‖∂function/∂x‖₂ at `x`, for a function of one tensor of any shape; ‖b∘a‖ is that of `lambda v: b(a(v))`."""
    with torch.enable_grad(), second_derivatives():
        source = x.detach().clone().requires_grad_()
        jacobian = Jacobian(function(source), source)
        start = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        return power_iteration(jacobian.times, jacobian.transposed_times, start, iterations, tolerance)


def dense_jacobian(function: Linear, x: Tensor) -> Tensor:
    """The whole Jacobian as a matrix (outputs, inputs): for small functions, and to check the above."""
    with second_derivatives():
        jacobian = torch.func.jacrev(function)(x.detach())
    return jacobian.detach().reshape(-1, x.numel())
