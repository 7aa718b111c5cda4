"""How far a real network's output can move, ‖∂net/∂x_t‖₂, beside Theorem 3.4's bound at the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor
from scalelong.errors import ScaleLongError
from scalelong.monitor.points import Points, coefficients_of, find_points, unwrapped
from scalelong.monitor.recorder import Hooks, Recorder
from scalelong.robustness.block_norms import block_norms
from scalelong.robustness.spectral import Jacobian, SpectralNorm, power_iteration, second_derivatives
from scalelong.theory.bounds import log_robustness


@dataclass(frozen=True)
class LocalLipschitz:
    """At a batch of inputs: the largest over its samples, each found from below by power iteration.

    network        ‖∂net/∂x_t‖₂, the most that a small perturbation is stretched
    coefficients   κ_1 … κ_N (of LS the largest of each skip's units)
    blocks         ‖b_i∘a_i‖₂, linearised where the network runs; None where the skips cannot be taken apart
    middle         L_0 = ‖∂f_N‖₂, from the innermost skip to what it joins
    log10_bound    log10 of Theorem 3.4's Σκ_i·M_0^i + M_0^N·L_0 with M_0 = max ‖b_i∘a_i‖
    """

    network: float
    converged: bool
    coefficients: tuple[float, ...] = ()
    blocks: tuple[float, ...] | None = None
    middle: float | None = None
    log10_bound: float | None = None
    note: str = ""

    @property
    def m0(self) -> float | None:
        return None if self.blocks is None else max(self.blocks)

    @property
    def exceeded(self) -> bool | None:
        """Whether the network moves further than the bound says, which it may: the theorem is about Eq. 3."""
        if self.log10_bound is None:
            return None
        return self.network > 0 and math.log10(self.network) > self.log10_bound


def local_lipschitz(
    net: nn.Module, x: Tensor, *args: Any, iterations: int = 50, tolerance: float = 5e-3, seed: int = 0, **kwargs: Any
) -> LocalLipschitz:
    """Measure where `net(x, *args, **kwargs)` runs; `x` is x_t, (B, …). Works best in eval mode."""
    root = unwrapped(net)
    points = find_points(root)
    with torch.enable_grad(), second_derivatives():
        source = x.detach().clone().requires_grad_()
        kept = _Kept(points)
        with Hooks(root, points).attached(kept):
            output = first_tensor(_plain(root(source, *args, **kwargs)))
        if output is None:
            raise ScaleLongError(f"{points.network} gave no tensor")
        network = _norm(output, source, iterations, tolerance, seed)
        skip, backbone = kept.ends
        middle = None if skip is None or backbone is None else _norm(backbone, skip, iterations, tolerance, seed).value
    kappas = _coefficients(root, points, kept)
    found = LocalLipschitz(network.value, network.converged, kappas, None, middle)
    if not points.n:
        return replace(found, note="no long skips are known, so Theorem 3.4 says nothing")
    try:
        blocks = block_norms(root, x, *args, iterations=iterations, tolerance=tolerance, seed=seed, **kwargs).norms
    except ScaleLongError as error:
        return replace(found, note=str(error))
    if middle is None or not kappas:
        return replace(found, blocks=blocks, note="the innermost skip was not met")
    log_bound = log_robustness(kappas, _log(max(blocks)), _log(middle))
    return replace(found, blocks=blocks, log10_bound=log_bound / math.log(10))


class _Kept(Recorder):
    """Keeps the innermost skip and what it joins, as tensors of the graph, and the largest κ_i."""

    def __init__(self, points: Points) -> None:
        super().__init__(points.size)
        self.wanted = {points.start(m) + points.n - 1: m for m in ("skip", "backbone")} if points.n else {}
        self.tensors: dict[str, Tensor] = {}

    def record(self, points: tuple[int, ...], x: Tensor | None) -> None:
        for point in points:
            if x is not None and point in self.wanted:
                self.tensors[self.wanted[point]] = x

    @property
    def ends(self) -> tuple[Tensor | None, Tensor | None]:
        return self.tensors.get("skip"), self.tensors.get("backbone")


def _norm(target: Tensor, source: Tensor, iterations: int, tolerance: float, seed: int) -> SpectralNorm:
    jacobian = Jacobian(target, source)
    start = torch.randn(source.shape, generator=torch.Generator().manual_seed(seed)).to(source)
    return power_iteration(jacobian.times, jacobian.transposed_times, start, iterations, tolerance)


def _coefficients(root: nn.Module, points: Points, kept: _Kept) -> tuple[float, ...]:
    fixed = coefficients_of(root, points.n)
    if fixed is not None:
        return fixed
    largest = {i: max(float(call[2]) for call in calls) for i, calls in kept.kappas.items()}
    return tuple(largest[i] for i in sorted(largest)) if len(largest) == points.n else ()


def _plain(output: Any) -> Any:
    return getattr(output, "sample", output)  # diffusers' outputs


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
