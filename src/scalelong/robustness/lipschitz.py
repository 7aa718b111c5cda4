"""Lipschitz constants of real networks: ‖∂net/∂x_t‖₂, ‖b_i∘a_i‖ (the paper's Fig. 11) and Theorem 3.4's bound.

In Eq. 3, a_i maps long skip i − 1 to long skip i (a_1 maps the network's input), and b_i maps the join of skip i to the
join of skip i − 1 (b_1 maps to the output). Real networks join by concatenation, so b_i∘a_i is linearized at an input:
the Jacobian of b_i with respect to the incoming skip, after κ_i, times the Jacobian of a_i. For the network of Eq. 3
this is the paper's b_i∘a_i itself. All norms come from power iteration; no Jacobian is formed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from scalelong._modules import first_tensor
from scalelong.errors import ScaleLongError, UnsupportedNetworkError, invalid
from scalelong.skips import Site, find_sites, scaling_of
from scalelong.skips.application import sites_of, unwrapped
from scalelong.skips.hooks import attach
from scalelong.skips.sites import ROOT
from scalelong.theory.bounds import log_or_minus_inf, log_robustness

NOT_SEPARABLE = (
    "‖b_i∘a_i‖ needs long skips that are separate arguments of a module; "
    "for other networks use scalelong.robustness.spectral_norm(lambda v: b(a(v)), x)"
)

INSIDE = 'κ_i acts inside b_i (placement="after_norm"), which the sum of Theorem 3.4 does not describe'


@contextmanager
def differentiable() -> Iterator[None]:
    """Passes with gradients wherever they are called, and with second ones: fused attention kernels have none."""
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


@dataclass(frozen=True)
class SpectralNorm:
    """A largest singular value. Power iteration converges from below: the true norm is at least `value`."""

    value: float
    iterations: int
    converged: bool


class Jacobian:
    """∂target/∂source of two tensors in one graph, as the products Jv and Jᵀu.

    Jᵀu is a gradient. It is linear in u, so its gradient with respect to u gives Jv. Double backward works wherever a
    second derivative exists and runs the function only once.
    """

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        self._u = torch.zeros_like(target, requires_grad=True)
        self._pulled = _gradient(target, source, self._u, create_graph=True)  # Jᵀu as a function of u

    def transposed_times(self, u: Tensor) -> Tensor:
        return _gradient(self.target, self.source, u)

    def times(self, v: Tensor) -> Tensor:
        return _gradient(self._pulled, self._u, v)


def _gradient(target: Tensor, source: Tensor, v: Tensor, create_graph: bool = False) -> Tensor:
    """∂⟨target, v⟩/∂source, zero if the target does not depend on the source."""
    if not target.requires_grad:
        return torch.zeros_like(source)
    options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
    return torch.autograd.grad(target, source, v, **options)[0]


def spectral_norm(
    function: Callable[[Tensor], Tensor], x: Tensor, iterations: int = 200, tolerance: float = 1e-5, seed: int = 0
) -> SpectralNorm:
    """‖∂function/∂x‖₂ at `x`, for a function of one tensor of any shape; pass `lambda v: b(a(v))` for ‖b∘a‖."""
    with differentiable():
        source = x.detach().clone().requires_grad_()
        return _norm([Jacobian(function(source), source)], iterations, tolerance, seed)


def _norm(chain: list[Jacobian], iterations: int, tolerance: float, seed: int) -> SpectralNorm:
    """‖J_k … J_1‖₂, the innermost first, by power iteration until its relative change is at most `tolerance`."""
    if iterations < 1:
        raise invalid("iterations", "an integer >= 1", iterations)
    source, value = chain[0].source, 0.0
    v = torch.randn(source.shape, generator=torch.Generator().manual_seed(seed)).to(source)
    for done in range(1, iterations + 1):
        v = v / v.norm()
        for jacobian in chain:
            v = jacobian.times(v)
        before, value = value, float(v.norm())
        if not math.isfinite(value):
            return SpectralNorm(value, done, converged=False)
        if abs(value - before) <= tolerance * value:  # also for a norm of 0
            return SpectralNorm(value, done, converged=True)
        for jacobian in reversed(chain):
            v = jacobian.transposed_times(v)
        if v.norm() == 0:
            return SpectralNorm(value, done, converged=True)
    return SpectralNorm(value, iterations, converged=False)


class _Join:
    """The tensors of one join, set during the pass."""

    skip: Tensor  # s_i, the encoder's output
    probe: Tensor  # a zero added to κ_i·s_i: its gradient is the decoder's alone
    backbone: Tensor  # the tensor that the skip joins: the output of b_{i+1}


@dataclass
class _Recorder:
    """Records every skip before κ_i, or adds a probe to it after κ_i."""

    joins: list[_Join]
    after: bool

    def scale(self, skip: Tensor, i: int) -> Tensor:
        if not self.after:
            self.joins[i - 1].skip = skip
            return skip
        probe = self.joins[i - 1].probe = torch.zeros_like(skip, requires_grad=True)
        return skip + probe


class _Pass:
    """A forward pass: input, output, joins (outermost first) and the largest |κ_i| that a scaling computed."""

    def __init__(self, net: nn.Module, sites: list[Site], x: Tensor, args: tuple[Any, ...], kwargs: Any) -> None:
        self.x = x.detach().clone().requires_grad_()
        self.joins = [_Join() for _ in sites]
        self.kappas: dict[int, float] = {}
        with ExitStack() as hooks:
            for after in (False, True) if sites else ():
                for handle in attach(net, sites, _Recorder(self.joins, after), before=not after):
                    hooks.callback(handle.remove)
            for site, join in zip(sites, self.joins, strict=True):
                module, hook = net.get_submodule(site.path), partial(_keep_backbone, join, site)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if (scaler := scaling_of(net)) is not None:
                hooks.callback(scaler.register_forward_hook(self._keep_largest).remove)
            returned = net(self.x, *args, **kwargs)
        output = first_tensor(getattr(returned, "sample", returned))  # .sample: diffusers' outputs
        if output is None:
            raise invalid("the network's output", "a tensor", type(returned).__name__)
        self.output = output

    def _keep_largest(self, module: nn.Module, args: tuple[Any, ...], kappa: float | Tensor) -> None:
        if isinstance(kappa, Tensor) and module.is_factor:
            self.kappas[args[1]] = max(float(kappa.detach().abs().max()), self.kappas.get(args[1], 0.0))


def _keep_backbone(join: _Join, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The join's first argument is the backbone, or starts with it if the carrier has concatenated the skip."""
    hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
    if site.carrier is not None and site.channels is not None:
        hidden = hidden.narrow(site.dim, 0, hidden.shape[site.dim] - site.channels)
    join.backbone = hidden


def _separable(sites: list[Site]) -> bool:
    """Whether every skip is an argument of its own, so that both sides of its join are visible."""
    return not any(site.trailing or site.leading or site.join or site.path == ROOT for site in sites)


@dataclass(frozen=True)
class BlockNorms:
    """‖b_i∘a_i‖ at one input, outermost first, from below by power iteration."""

    norms: tuple[float, ...]
    details: tuple[SpectralNorm, ...]

    @property
    def m0(self) -> float:
        """Theorem 3.4's M_0 = max ‖b_i∘a_i‖."""
        return max(self.norms)


def block_norms(
    net: nn.Module,
    *example: Any,
    sites: Iterable[Site | str] | None = None,
    iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
    **options: Any,
) -> BlockNorms:
    """Measure ‖b_i∘a_i‖ of every long skip at the inputs of `net(*example, **options)`; `example[0]` is x_t.

    Over a batch it is the largest of the samples, because the Jacobian is block diagonal. Supports U-ViT, the U-Nets
    of diffusers and MONAI, the network of Eq. 3, and any other network whose skips are separate arguments.
    """
    if not example or not isinstance(example[0], Tensor) or not example[0].is_floating_point():
        raise invalid("the first argument of the example", "the noisy input x_t, a float tensor", example[:1])
    known = find_sites(net, sites)
    if not _separable(known):
        raise UnsupportedNetworkError(NOT_SEPARABLE)
    with differentiable():
        run = _Pass(net, known, example[0], example[1:], options)
        return _block_norms(run, iterations, tolerance, seed)


def _block_norms(run: _Pass, iterations: int, tolerance: float, seed: int) -> BlockNorms:
    details = []
    source, target = run.x, run.output
    for i, join in enumerate(run.joins, start=1):
        if len(vars(join)) < 3:
            raise UnsupportedNetworkError(f"the input does not pass through long skip {i}")
        chain = [Jacobian(join.skip, source), Jacobian(target, join.probe)]
        details.append(_norm(chain, iterations, tolerance, seed + i))
        source, target = join.skip, join.backbone
    return BlockNorms(tuple(one.value for one in details), tuple(details))


@dataclass(frozen=True)
class LocalLipschitz:
    """The largest values over a batch of inputs, from below by power iteration.

    network: ‖∂net/∂x_t‖₂, the largest amplification of a small perturbation.
    coefficients: κ_1 … κ_N; if the pass computes them (LS, a range of timesteps), each skip's largest |κ_i|.
    blocks: ‖b_i∘a_i‖₂, linearized at the inputs; None if the skips cannot be separated. With placement="after_norm"
        κ_i is part of b_i.
    middle: L_0 = ‖∂f_N‖₂, from the innermost skip to the tensor that it joins.
    log10_bound: log10 of Theorem 3.4's Σ|κ_i|·M_0^i + M_0^N·L_0 with M_0 = max ‖b_i∘a_i‖.
    note: why a value is missing.
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
        """Whether the network exceeds the bound. It may: the theorem is about Eq. 3."""
        if self.log10_bound is None:
            return None
        return self.network > 0 and math.log10(self.network) > self.log10_bound


def local_lipschitz(
    net: nn.Module, x: Tensor, *args: Any, iterations: int = 50, tolerance: float = 5e-3, seed: int = 0, **kwargs: Any
) -> LocalLipschitz:
    """Measure ‖∂net/∂x_t‖₂ and Theorem 3.4's bound at `net(x, *args, **kwargs)`. `x` is x_t, (B, …); use eval mode."""
    root = unwrapped(net, allow_wrappers=True)
    try:
        known, _ = sites_of(root)
    except ScaleLongError:
        known = []
    sites, n = known if _separable(known) else [], len(known)
    with differentiable():
        run = _Pass(root, sites, x, args, kwargs)
        network = _norm([Jacobian(run.output, run.x)], iterations, tolerance, seed)
        result = LocalLipschitz(network.value, network.converged, _coefficients(root, n, run))
        if not sites:
            return replace(result, note=NOT_SEPARABLE if known else "no long skips found: Theorem 3.4 does not apply")
        try:
            blocks = _block_norms(run, iterations, tolerance, seed)
        except UnsupportedNetworkError as error:
            return replace(result, note=str(error))
        inner = run.joins[-1]
        middle = _norm([Jacobian(inner.backbone, inner.skip)], iterations, tolerance, seed).value
    result = replace(result, blocks=blocks.norms, middle=middle)
    if (scaler := scaling_of(root)) is not None and scaler.placement == "after_norm":
        return replace(result, note=INSIDE)
    if not result.coefficients:
        return replace(result, note="the coefficients κ_i of this scaling could not be recorded")
    sizes = [abs(kappa) for kappa in result.coefficients]
    log_bound = log_robustness(sizes, log_or_minus_inf(blocks.m0), log_or_minus_inf(middle))
    return replace(result, log10_bound=log_bound / math.log(10))


def _coefficients(root: nn.Module, n: int, run: _Pass) -> tuple[float, ...]:
    scaler = scaling_of(root)
    fixed = (1.0,) * n if scaler is None or not n else scaler.spec.coefficients(n)
    if fixed is not None and not (scaler is not None and scaler.timed):  # outside its timesteps κ_i is 1
        return fixed
    return tuple(run.kappas[i] for i in range(1, n + 1)) if len(run.kappas) == n else ()
