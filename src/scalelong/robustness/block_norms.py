"""‖b_i∘a_i‖ of real networks (the paper's Fig. 11), by power iteration on Jacobian–vector products.

In Eq. 3 a_i takes long skip i − 1 to long skip i (the first takes the network's input), and b_i takes the join of
skip i to the join of skip i − 1 (the last gives the network's output). Real networks join by concatenation, so
b_i∘a_i is linearised where they run: the Jacobian of b_i with respect to the skip that comes in, after κ_i, times
the Jacobian of a_i. For the network of Eq. 3 this is the paper's b_i∘a_i itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.robustness.spectral import Jacobian, SpectralNorm, power_iteration, second_derivatives
from scalelong.skips import Site, find_sites
from scalelong.skips.hooks import Handle, attach
from scalelong.skips.sites import ROOT


@dataclass(frozen=True)
class BlockNorms:
    """‖b_i∘a_i‖ at one input, outermost first. Power iteration comes from below, so each is at least this."""

    norms: tuple[float, ...]
    details: tuple[SpectralNorm, ...]

    @property
    def m0(self) -> float:
        """Theorem 3.4's M_0 = max ‖b_i∘a_i‖."""
        return max(self.norms)


@dataclass
class _Join:
    """What passes where one long skip is consumed."""

    skip: Tensor | None = None  # s_i as the encoder gave it
    probe: Tensor | None = None  # zeros added to κ_i·s_i: its gradient is the decoder's alone
    backbone: Tensor | None = None  # what the skip is joined with: the output of b_{i+1}


def block_norms(
    net: nn.Module,
    *example: Any,
    sites: Iterable[Site | str] | None = None,
    iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
    **options: Any,
) -> BlockNorms:
    """Measure ‖b_i∘a_i‖ of every long skip where `net(*example, **options)` runs; `example[0]` is x_t.

    Over a batch it is the largest of its samples, because their Jacobians stand side by side. Works on U-ViT,
    diffusers' and MONAI's U-Nets and the network of Eq. 3: wherever the skip is an argument of its own.
    """
    if not example or not isinstance(example[0], Tensor) or not example[0].is_floating_point():
        raise ScaleLongError("the example's first argument must be the noisy input x_t, a tensor of floats")
    found = find_sites(net, sites)
    if any(site.trailing or site.path == ROOT for site in found):
        raise ScaleLongError(
            "the long skips of this network come concatenated already, so the encoder's side of them is not visible; "
            "use scalelong.robustness.spectral.spectral_norm(lambda v: b(a(v)), x) with its blocks"
        )
    x = example[0].detach().clone().requires_grad_()
    with torch.enable_grad(), second_derivatives():
        joins, output = _run(net, found, (x, *example[1:]), options)
        details = []
        sources = [x, *(_given(join.skip, k) for k, join in enumerate(joins[:-1], start=1))]
        targets = [output, *(_given(join.backbone, k) for k, join in enumerate(joins[:-1], start=1))]
        for i, (join, source, target) in enumerate(zip(joins, sources, targets, strict=True), start=1):
            a = Jacobian(_given(join.skip, i), source)
            b = Jacobian(target, _given(join.probe, i))
            start = torch.randn(source.shape, generator=torch.Generator().manual_seed(seed + i)).to(source)
            details.append(_composed(a, b, start, iterations, tolerance))
    return BlockNorms(tuple(one.value for one in details), tuple(details))


def _composed(a: Jacobian, b: Jacobian, start: Tensor, iterations: int, tolerance: float) -> SpectralNorm:
    def multiply(v: Tensor) -> Tensor:
        return b.times(a.times(v))

    def transpose(u: Tensor) -> Tensor:
        return a.transposed_times(b.transposed_times(u))

    return power_iteration(multiply, transpose, start, iterations, tolerance)


def _run(
    net: nn.Module, sites: list[Site], example: tuple[Any, ...], options: dict[str, Any]
) -> tuple[list[_Join], Tensor]:
    """One forward pass with hooks that look at the joins: before the scaling's own hooks, and behind them."""
    joins = [_Join() for _ in sites]
    handles = list[Handle]()
    try:
        handles += attach(net, sites, _KeepSkips(joins), before=True)
        handles += attach(net, sites, _AddProbes(joins))
        for site, join in zip(sites, joins, strict=True):
            hook = _keep_backbone(join, site)
            handles.append(net.get_submodule(site.path).register_forward_pre_hook(hook, with_kwargs=True))
        output = net(*example, **options)
    finally:
        for handle in handles:
            handle.remove()
    output = getattr(output, "sample", output)
    if isinstance(output, (tuple, list)):
        output = output[0]
    if not isinstance(output, Tensor):
        raise ScaleLongError(f"the network's output is a {type(output).__name__}, not a tensor")
    return joins, output


class _KeepSkips:
    """Sees every skip before κ_i."""

    def __init__(self, joins: list[_Join]) -> None:
        self.joins = joins

    def scale(self, skip: Tensor, i: int) -> Tensor:
        self.joins[i - 1].skip = skip
        return skip


class _AddProbes(_KeepSkips):
    """Adds a probe to every skip after κ_i."""

    def scale(self, skip: Tensor, i: int) -> Tensor:
        probe = self.joins[i - 1].probe = torch.zeros_like(skip, requires_grad=True)
        return skip + probe


def _keep_backbone(join: _Join, site: Site) -> Any:
    """The join's first argument is the backbone, or begins with it where the carrier has concatenated."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if site.carrier is not None and site.channels is not None:
            hidden = hidden.narrow(site.dim, 0, hidden.shape[site.dim] - site.channels)
        join.backbone = hidden

    return hook


def _given(tensor: Tensor | None, i: int) -> Tensor:
    if tensor is None:
        raise ScaleLongError(f"the example did not pass through long skip {i}")
    return tensor
