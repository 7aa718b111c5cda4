"""Measure forward and backward propagation through the network of Eq. 3 (Theorems 3.1 and 3.3, Lemma 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from scalelong.scaling import FixedScaling
from scalelong.skips import apply, remove
from scalelong.theory.stacked import Stack, StackedUNet


@dataclass(frozen=True)
class Propagation:
    """A batch of inputs through one network and back.

    features: ‖h_i‖²/‖x_t‖² for i = 0 … N.  (B, N+1)
    gradients: ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of every matrix and sample, rows a_1 … a_N, f_N, b_1 … b_N, columns p = 1 … l.
        (B, 2N+1, l)
    """

    features: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class NoisyInput:
    """x_t = √ᾱ_t x_0 + √(1 − ᾱ_t) ε with the noise that made it.  (B, m) each"""

    x_t: Tensor
    eps: Tensor


def gradient_index(row: int, num_skips: int) -> int:
    """The skip index i of a row of `Propagation.gradients`; N + 1 for the middle block."""
    return row + 1 if row <= num_skips else row - num_skips


def blocks(net: StackedUNet) -> list[Stack]:
    """Every block in the order of `Propagation.gradients`: a_1 … a_N, f_N, b_1 … b_N."""
    found = [*net.encoders, net.middle, *net.decoders]
    assert all(isinstance(block, Stack) for block in found)
    return found


@contextmanager
def scaled(net: StackedUNet, scaling: FixedScaling) -> Iterator[StackedUNet]:
    """The same weights under another scaling, for as long as the block runs."""
    apply(net, scaling, replace=True)
    try:
        yield net
    finally:
        remove(net)


def measure_propagation(net: StackedUNet, x_t: Tensor, eps: Tensor) -> Propagation:
    """Run samples (B, m) forward and each one's loss ℓ = ‖ε − UNet(x_t)‖² (Eq. 2) backward.

    One sample's gradient of W is the outer product of ∂ℓ/∂(Wz) and W's input z, so its norm is the product of theirs
    and no matrix of gradients is formed.
    """
    calls: list[tuple[Tensor, Tensor]] = []  # (z, Wz) of every matrix
    matrices = [matrix for block in blocks(net) for matrix in block.matrices]
    hooks = [m.register_forward_hook(lambda _, args, output: calls.append((args[0], output))) for m in matrices]
    try:
        features = net.features(x_t.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    loss = (eps - features.hidden[0]).square().sum(1)  # (B,)
    backward = torch.autograd.grad(loss.sum(), [output for _, output in calls])
    x_norm_sq = x_t.square().sum(1)
    norms = [q.square().sum(1) * z.detach().square().sum(1) for q, (z, _) in zip(backward, calls, strict=True)]
    n, depth = net.num_skips, net.block_depth
    called = torch.stack(norms, dim=1).reshape(len(x_t), 2 * n + 1, depth)  # a_1 … a_N, f_N, b_N … b_1
    called = torch.cat([called[:, : n + 1], called[:, n + 1 :].flip(1)], dim=1)
    return Propagation(
        features=torch.stack([h.detach().square().sum(1) for h in features.hidden], dim=1) / x_norm_sq[:, None],
        gradients=called / (loss.detach() * x_norm_sq)[:, None, None],
    )


def draw_inputs(count: int, width: int, alpha_bar: Tensor, seed: int) -> NoisyInput:
    """Noisy samples as Lemma 3.2 assumes them: x_0 uniform on [−1, 1], t uniform over the schedule's steps."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(len(alpha_bar), (count, 1), generator=generator)
    a = alpha_bar.to(torch.float32)[t]  # (count, 1)
    x_0 = torch.rand(count, width, generator=generator) * 2 - 1
    eps = torch.randn(count, width, generator=generator)
    return NoisyInput(a.sqrt() * x_0 + (1 - a).sqrt() * eps, eps)
