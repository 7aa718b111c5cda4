"""Measure Theorem 3.4 on the network of Eq. 3: how far its output can move, and the two bounds on that.

ReLU networks are linear around an input, so for a small perturbation the exact answer is the spectral norm of the
Jacobian ∂UNet/∂x_t. Theorem 3.4 is held against it with the norms of the blocks' Jacobians at the same input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.scaling import FixedSkips
from scalelong.skips import scaling_of
from scalelong.theory.bounds import log_robustness, log_robustness_product
from scalelong.theory.stacked import Stack, StackedUNet


@dataclass(frozen=True)
class LocalRobustness:
    """Norms of the Jacobians at one input, outermost first."""

    coefficients: tuple[float, ...]
    network: float
    """‖∂UNet/∂x_t‖₂: the largest ‖UNet(x_t + δ) − UNet(x_t)‖/‖δ‖ of a small δ."""
    separate: tuple[float, ...]
    """‖J_{b_i}‖‖J_{a_i}‖."""
    composed: tuple[float, ...]
    """‖J_{b_i}J_{a_i}‖, the paper's ‖b_i∘a_i‖."""
    middle: float
    """‖J_{f_N}‖, the paper's L_0."""

    @property
    def log_certified(self) -> float:
        """Theorem 3.4 with M_0 = max ‖J_b‖‖J_a‖: by the triangle inequality and submultiplicativity it always holds."""
        return log_robustness(self.coefficients, _log(max(self.separate)), _log(self.middle))

    @property
    def log_paper(self) -> float:
        """Theorem 3.4 with the paper's M_0 = max ‖b_i∘a_i‖: Eq. 61's step can break it."""
        return log_robustness(self.coefficients, _log(max(self.composed)), _log(self.middle))

    @property
    def log_paper_product(self) -> float:
        """The same before the maximum is taken (Eq. 65, fourth line)."""
        return log_robustness_product(self.coefficients, [_log(v) for v in self.composed], _log(self.middle))

    def violates(self, log_bound: float, slack: float = 1e-5) -> bool:
        """Whether the network's own norm exceeds a bound, by more than rounding."""
        return self.network > 0 and math.log(self.network) > log_bound + slack


def measure_robustness(net: StackedUNet, x: Tensor) -> LocalRobustness:
    """Every Jacobian at one input `x` (m,), exactly, from the matrices and the ReLUs' pattern."""
    if x.shape != (net.width,):
        raise ScaleLongError(f"one input of shape ({net.width},) is needed, not {tuple(x.shape)}")
    kappas = coefficients_of(net)
    with torch.no_grad():
        features = net.features(x)
        joins = [k * s + h for k, s, h in zip(kappas, features.skips, features.hidden[1:], strict=True)]
        into = [x, *features.skips[:-1]]
        J_a = [stack_jacobian(a, s) for a, s in zip(net.encoders, into, strict=True)]
        J_b = [stack_jacobian(b, z) for b, z in zip(net.decoders, joins, strict=True)]
        J_middle = stack_jacobian(net.middle, features.skips[-1])
        J = J_middle
        for kappa, a, b in zip(reversed(kappas), reversed(J_a), reversed(J_b), strict=True):
            J = b @ (kappa * a + J @ a)  # ∇f_{i−1} = J_b (κ_i + ∇f_i) J_a
        separate = _norms(J_b) * _norms(J_a)
        composed = _norms([b @ a for a, b in zip(J_a, J_b, strict=True)])
        network, middle = _norms([J, J_middle]).tolist()
    return LocalRobustness(kappas, network, tuple(separate.tolist()), tuple(composed.tolist()), middle)


def global_log_norms(net: StackedUNet) -> tuple[float, float]:
    """log M_0 and log L_0 that hold at every input, from the matrices' own norms: max Π‖W‖ and the middle's Π‖W‖.

    With them Theorem 3.4 (`bounds.log_robustness`) is certified for perturbations of any size.
    """
    with torch.no_grad():
        a, b = (_weight_norms(stacks) for stacks in (net.encoders, net.decoders))
        middle = float(_weight_norms([net.middle])[0])
    return _log(float((a * b).max())), _log(middle)


def stack_jacobian(stack: nn.Module, x: Tensor) -> Tensor:
    """∂(stack∘x)/∂x at one input (m,): the matrices with the closed ReLUs' rows struck out.  (m, m)"""
    *inner, last = _weights(stack)
    J = torch.eye(len(x), dtype=x.dtype)
    for weight in inner:
        x = weight @ x
        open_ = (x > 0).to(x.dtype)
        x, J = x * open_, open_[:, None] * (weight @ J)
    return last @ J


def coefficients_of(net: StackedUNet) -> tuple[float, ...]:
    """κ_1 … κ_N in force."""
    scaler = scaling_of(net)
    if scaler is None:
        return (1.0,) * net.num_skips
    if not isinstance(scaler, FixedSkips):
        raise ScaleLongError(f"the coefficients of {scaler.spec!r} are not constants; the bounds need κ_1 … κ_N")
    return scaler.coefficients


def counterexample(stretch: float = 10.0) -> StackedUNet:
    """A network of two skips and width 2 in which the paper's bound fails, by a factor that grows like stretch².

    b_1∘a_1 is the identity, but b_1 and a_1 stretch opposite axes and b_2 swaps the axes between them. Every
    ‖b_i∘a_i‖ is 1 while the network stretches by stretch²: norms of products do not see what happens in between.
    """
    net = StackedUNet(width=2, num_skips=2, block_depth=1)
    stretched = torch.tensor([stretch, 1 / stretch]).diag()
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    matrices = [stretched, torch.eye(2), torch.eye(2), torch.linalg.inv(stretched), swap]  # a_1, a_2, f_N, b_1, b_2
    with torch.no_grad():
        for block, matrix in zip((*net.encoders, net.middle, *net.decoders), matrices, strict=True):
            _weights(block)[0].copy_(matrix)
    return net


def _norms(matrices: list[Tensor]) -> Tensor:
    return torch.linalg.matrix_norm(torch.stack(matrices), ord=2)


def _weights(stack: nn.Module) -> list[Tensor]:
    assert isinstance(stack, Stack)
    return [matrix.weight for matrix in stack.matrices if isinstance(matrix, nn.Linear)]


def _weight_norms(stacks: Iterable[nn.Module]) -> Tensor:
    """Π_p ‖W_p‖ of each stack."""
    return torch.stack([_norms(_weights(stack)).prod() for stack in stacks])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
