"""Scale the long skips of a network in place, and take the scaling off again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from scalelong.errors import ScaleLongError, ScalingWarning, unknown
from scalelong.scaling import (
    BlockScaling,
    ConstantScaling,
    NoScaling,
    Scaling,
    SkipScaling,
    SkipShape,
    build,
    parse_scaling,
)
from scalelong.skips.adapters import find_sites
from scalelong.skips.finders import find_branches
from scalelong.skips.hooks import attach, attach_branches, detach
from scalelong.skips.sites import Site

NAME = "skip_scaling"  # the attribute of a network's root under which its one scaling module is registered
PLACEMENTS = ("join", "after_norm")
SMALLEST = 0.01  # below this the innermost skip is as good as cut

Net = TypeVar("Net", bound=nn.Module)


def apply(
    net: Net,
    scaling: Scaling | str | dict[str, Any],
    *,
    sites: Iterable[Site | str] | None = None,
    placement: str = "join",
    replace: bool = False,
) -> Net:
    """Scale the long skips of `net` in place and return it.

    Call it before the optimizer is built (LS has parameters), before `torch.compile` and before DDP or FSDP.

    scaling     a spec such as ConstantScaling(0.7) or LearnableScaling()
    sites       the long skips, outermost first, for a network that is not known (see `Site`, `register_adapter`)
    placement   "join": κ_i on the skip where it joins the backbone; "after_norm": κ_i behind the normalisation
                that sees the concatenation, for networks whose norm would cancel it (`describe` measures that)
    replace     take another scaling off first instead of refusing
    """
    spec = parse_scaling(scaling)
    root = _root(net)
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    if scaling_of(root) is not None:
        if not replace:
            raise ScaleLongError(
                f"{type(root).__name__} is scaled already ({_spec(root)}); remove(net) first, or apply(…, replace=True)"
            )
        remove(root)
    if isinstance(spec, BlockScaling):
        _apply_to_branches(root, spec)
    else:
        found = find_sites(root, sites)
        if not isinstance(spec, NoScaling):
            scaler = build(spec, [site.shape for site in found])
            _warn_if_cut(spec, len(found))
            attach(root, found, scaler, placement)
            _register(root, scaler, found, placement)
    _note_in_config(root, spec)
    return net


def remove(net: Net) -> Net:
    """Take the scaling off: the network is bit for bit what it was. An unscaled network is left alone."""
    root = _root(net)
    scaler = scaling_of(root)
    if scaler is not None:
        detach(root, scaler)
        delattr(root, NAME)
        _note_in_config(root, NoScaling())
    return net


def parameters(net: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the scaling added (LS, ReZero), for an optimizer group of their own."""
    scaler = scaling_of(_root(net, wrapped=True))
    return iter(()) if scaler is None else scaler.parameters()


def scaling_of(net: nn.Module) -> SkipScaling | None:
    """The module that scales `net`, or None for an unscaled network."""
    scaler = getattr(net, NAME, None)
    return scaler if isinstance(scaler, SkipScaling) else None


def sites_of(net: nn.Module) -> tuple[list[Site], str]:
    """The sites and the placement in force: those it was scaled with, or those found in an unscaled network."""
    scaler = scaling_of(net)
    if scaler is not None and scaler.sites:
        return list(scaler.sites), scaler.placement
    return find_sites(net), "join"


def _register(root: nn.Module, scaler: SkipScaling, sites: list[Site], placement: str) -> None:
    """The module joins the network's device, precision and mode, and remembers where it acts."""
    like = next((p for p in root.parameters() if p.is_floating_point()), None)
    if like is not None:
        scaler.to(device=like.device, dtype=like.dtype)
    scaler.train(root.training)
    scaler.sites, scaler.placement = tuple(sites), placement
    root.add_module(NAME, scaler)


def _apply_to_branches(root: nn.Module, spec: BlockScaling) -> None:
    branches = find_branches(root)
    if branches is None:
        raise ScaleLongError(
            f"{spec.kind!r} scales block outputs and is for U-ViT (blocks with attn and mlp), not {type(root).__name__}"
        )
    scaler = build(spec, [SkipShape(None)] * len(branches))
    attach_branches(root, branches, scaler)
    _register(root, scaler, [], "join")


def _root(net: Any, wrapped: bool = False) -> nn.Module:
    """The network itself: inside PEFT's wrapper; a refusal for wrappers that must come after scaling."""
    if not isinstance(net, nn.Module):
        raise ScaleLongError(
            f"a network (torch.nn.Module) is scaled, not {type(net).__name__}; of a diffusers pipeline take pipe.unet"
        )
    names = {cls.__name__ for cls in type(net).__mro__}
    for name, what in _WRAPPERS.items():
        if name in names:
            if wrapped:
                inner = getattr(net, "_orig_mod", getattr(net, "module", net))
                return inner if inner is net else _root(inner, wrapped=True)
            raise ScaleLongError(
                f"the network is wrapped by {what} already; the right order is scalelong.apply(net, scaling), "
                f"then the optimizer, then {what}"
            )
    if getattr(net, "_compiled_call_impl", None) is not None and not wrapped:
        raise ScaleLongError(
            "the network is compiled already; the right order is scalelong.apply(net, scaling), then net.compile()"
        )
    base: Any = getattr(net, "get_base_model", None)
    return _root(base(), wrapped) if "PeftModel" in names and base is not None else net


_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP (fully_shard)",
    "OptimizedModule": "torch.compile",
}


def _warn_if_cut(spec: Scaling, n: int) -> None:
    """DESIGN's notice: κ^(N−1) below 0.01 leaves the innermost skip unused."""
    if isinstance(spec, ConstantScaling) and spec.kappa ** (n - 1) < SMALLEST:
        smallest = min(spec.coefficients(n))
        advice = SMALLEST ** (1 / (n - 1))
        warnings.warn(
            f"kappa = {spec.kappa:g} with {n} long skips scales one of them by {smallest:.2g}, which all but cuts it; "
            f"kappa from {advice:.2f} up keeps every skip above {SMALLEST:g} (scalelong.estimate_kappa proposes one)",
            ScalingWarning,
            stacklevel=3,
        )


def _note_in_config(root: nn.Module, spec: Scaling) -> None:
    """A network whose own config has a `scaling` (our U-ViT) keeps it true, so that it is saved."""
    config = getattr(root, "config", None)
    register: Any = getattr(root, "register_to_config", None)
    if register is not None and config is not None and "scaling" in config:
        register(scaling=spec.to_dict())


def _spec(root: nn.Module) -> Scaling:
    scaler = scaling_of(root)
    assert scaler is not None
    return scaler.spec
