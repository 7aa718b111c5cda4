"""Scale the long skips of a network in place, and remove the scaling."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from scalelong.errors import ScalingStateError, ScalingWarning, UnsupportedNetworkError, invalid, unknown
from scalelong.scaling import NoScaling, Scaling, SkipScaling, SkipShape, parse_scaling
from scalelong.skips.finders import find_branches, find_sites
from scalelong.skips.hooks import NAME, attach, attach_branches, detach, scaling_of
from scalelong.skips.sites import Site, declared_sites

PLACEMENTS = ("join", "after_norm")

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

    Call it before you build the optimizer (LS has parameters) and before `torch.compile`, DDP or FSDP.

    Args:
        net: A network that scalelong knows or that declares `long_skips`; any other one together with `sites`.
        scaling: A spec such as `ConstantScaling(0.7)` or `LearnableScaling()`.
        sites: The long skips of an unknown network, outermost first (see `Site` and `register_adapter`).
        placement: "join" scales the skip where it joins the backbone. "after_norm" scales it after the normalization
            of the concatenation, for networks whose norm would cancel κ_i (`describe` measures that).
        replace: Replace an existing scaling instead of raising an error.
    """
    root = unwrapped(net)
    spec = parse_scaling(scaling)
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    former = scaling_of(root)
    if former is not None and not replace:
        raise ScalingStateError(
            f"{type(root).__name__} is already scaled with {former.spec}; call remove(net) first or pass replace=True"
        )
    with restore_on_failure(root):
        if former is not None:
            _unregister(root, former)
        if spec.acts_on == "blocks":
            _register(root, _like(root, spec.build([SkipShape(None)] * len(_branches(root, spec)))))
        else:
            found = find_sites(root, sites)
            if not spec.is_identity:
                scaler = spec.build([site.shape for site in found])
                scaler.sites, scaler.placement = tuple(found), placement
                _report_notices(spec, len(found))
                _register(root, _like(root, scaler))
    return net


def remove(net: Net) -> Net:
    """Remove the scaling; the network is bit for bit what it was. Does nothing to an unscaled network."""
    root = unwrapped(net, action="remove")
    scaler = scaling_of(root)
    if scaler is not None:
        _unregister(root, scaler)
    return net


@contextmanager
def unscaled(net: Net) -> Iterator[Net]:
    """Remove the scaling within a `with` block, then put the same module back, LS weights included.

    Use it to save with a library that expects only its own weights: `with unscaled(unet): pipe.save_pretrained(…)`.
    """
    root = unwrapped(net, allow_wrappers=True)
    scaler = scaling_of(root)
    if scaler is None:
        yield net
        return
    _unregister(root, scaler)
    try:
        yield net
    finally:
        _register(root, scaler)


@contextmanager
def restore_on_failure(root: nn.Module) -> Iterator[None]:
    """Restore the scaling that the network had if the block raises."""
    former = scaling_of(root)
    try:
        yield
    except Exception:
        current = scaling_of(root)
        if current is not former:
            if current is not None:
                _unregister(root, current)
            if former is not None:
                _register(root, former)
        raise


def parameters(net: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that the scaling added (LS, ReZero), for an optimizer group of their own."""
    scaler = scaling_of(unwrapped(net, allow_wrappers=True))
    return iter(()) if scaler is None else scaler.parameters()


def sites_of(net: nn.Module) -> tuple[list[Site], str]:
    """Return the sites and the placement that a network is scaled with, or would be by default."""
    scaler = scaling_of(net)
    if scaler is not None and scaler.sites:
        return list(scaler.sites), scaler.placement
    return find_sites(net), "join"


def unwrapped(net: Any, allow_wrappers: bool = False, action: str = "apply") -> nn.Module:
    """Return the network inside PEFT's wrapper.

    Wrappers that must come after scaling (DDP, FSDP, torch.compile) raise an error unless `allow_wrappers` is set.
    """
    if not isinstance(net, nn.Module):
        raise invalid("net", "a torch.nn.Module", type(net).__name__, "for a diffusers pipeline pass pipe.unet")
    if allow_wrappers:
        inner = getattr(net, "_orig_mod", getattr(net, "module", net)) if _wrapper(net) else net
        if inner is not net:
            return unwrapped(inner, allow_wrappers=True)
    else:
        for path, module in net.named_modules():
            if (wrapper := _wrapper(module)) is not None:
                what = f"module {path!r}" if path else "the network"
                if action == "remove":
                    order = "remove the scaling from the network itself, then wrap it again"
                else:
                    order = f"call scalelong.apply(net, scaling) first, then {wrapper} and the optimizer"
                raise ScalingStateError(f"{what} is already wrapped by {wrapper}; {order}")
    if any(cls.__name__ == "PeftModel" for cls in type(net).__mro__):
        base: Any = net.get_base_model
        return unwrapped(base(), allow_wrappers, action)
    return net


def _wrapper(module: nn.Module) -> str | None:
    """Name the wrapper of a module that hooks no longer reach, or that has already collected its parameters."""
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS:
            return _WRAPPERS[cls.__name__]
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return "torch.compile" if compiled or hasattr(module.forward, "_torchdynamo_orig_callable") else None


_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP (fully_shard)",
    "OptimizedModule": "torch.compile",
}


def _like(root: nn.Module, scaler: SkipScaling) -> SkipScaling:
    """Move the module to the network's device, dtype and mode."""
    like = next((p for p in root.parameters() if p.is_floating_point()), None)
    if like is not None:
        scaler.to(device=like.device, dtype=like.dtype)
    return scaler.train(root.training)


def _register(root: nn.Module, scaler: SkipScaling) -> None:
    """Attach the scaling module; from now on it moves, trains and is saved with the network."""
    if hasattr(root, NAME):
        raise ScalingStateError(
            f"{type(root).__name__} has its own attribute {NAME!r}, under which the scaling is registered; rename it"
        )
    try:
        if scaler.spec.acts_on == "blocks":
            attach_branches(root, _branches(root, scaler.spec), scaler)
        elif scaler.placement != "join" or declared_sites(root) is None:  # else `forward` calls scale_skip
            attach(root, list(scaler.sites), scaler, placement=scaler.placement)
    except Exception:
        detach(root, scaler)
        raise
    root.add_module(NAME, scaler)
    _update_config(root, scaler.spec)


def _unregister(root: nn.Module, scaler: SkipScaling) -> None:
    detach(root, scaler)
    delattr(root, NAME)
    _update_config(root, NoScaling())


def _branches(root: nn.Module, spec: Scaling) -> list[list[str]]:
    branches = find_branches(root)
    if branches is None:
        raise UnsupportedNetworkError(
            f"scaling {spec.kind!r} acts on block outputs and requires a U-ViT (blocks with attn and mlp), got "
            f"{type(root).__name__}"
        )
    return branches


def _report_notices(spec: Scaling, n: int) -> None:
    """Warn of a skip that is almost cut; log a Σκ² outside the paper's range."""
    for notice in spec.notices(n):
        if notice.level == "warning":
            warnings.warn(f"{notice} (scalelong.estimate_kappa proposes a value)", ScalingWarning, stacklevel=3)
        else:
            logging.getLogger("scalelong").info("%s", notice)


def _update_config(root: nn.Module, spec: Scaling) -> None:
    """Keep the config of a network that stores its scaling there (our U-ViT) up to date."""
    config = getattr(root, "config", None)
    register: Any = getattr(root, "register_to_config", None)
    if register is not None and config is not None and "scaling" in config:
        register(scaling=spec.to_dict())
