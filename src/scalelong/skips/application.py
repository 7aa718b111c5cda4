"""Scale the long skips of a network in place, and take the scaling off again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from scalelong.errors import ScaleLongError, ScalingWarning, unknown
from scalelong.scaling import NoScaling, Scaling, SkipScaling, SkipShape, parse_scaling
from scalelong.skips.adapters import find_sites
from scalelong.skips.finders import find_branches
from scalelong.skips.hooks import attach, attach_branches, detach
from scalelong.skips.sites import Site

NAME = "skip_scaling"  # the attribute of a network's root under which its one scaling module is registered
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

    Call it before the optimizer is built (LS has parameters), before `torch.compile` and before DDP or FSDP.

    scaling     a spec such as ConstantScaling(0.7) or LearnableScaling()
    sites       the long skips, outermost first, for a network that is not known (see `Site`, `register_adapter`)
    placement   "join": κ_i on the skip where it joins the backbone; "after_norm": κ_i behind the normalisation
                that sees the concatenation, for networks whose norm would cancel it (`describe` measures that)
    replace     take another scaling off first instead of refusing
    """
    root = _root(net)
    spec = parse_scaling(scaling)
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    former = scaling_of(root)
    if former is not None and not replace:
        raise ScaleLongError(
            f"{type(root).__name__} is scaled already ({former.spec}); remove(net) first, or apply(…, replace=True)"
        )
    with former_scaling_on_failure(root):
        if former is not None:
            _take_off(root, former)
        if spec.acts_on == "blocks":
            _put_on(root, _like(root, spec.build([SkipShape(None)] * len(_branches(root, spec)))))
        else:
            found = find_sites(root, sites)
            if not spec.is_identity:
                scaler = spec.build([site.shape for site in found])
                scaler.sites, scaler.placement = tuple(found), placement
                _give_notice(spec, len(found))
                _put_on(root, _like(root, scaler))
    return net


def remove(net: Net) -> Net:
    """Take the scaling off: the network is bit for bit what it was. An unscaled network is left alone."""
    root = _root(net, doing="remove")
    scaler = scaling_of(root)
    if scaler is not None:
        _take_off(root, scaler)
    return net


@contextmanager
def unscaled(net: Net) -> Iterator[Net]:
    """Take the scaling off for the length of a `with` block, then put the very same one back, LS weights and all.

    For saving by a library that expects only its own weights: `with unscaled(unet): pipe.save_pretrained(folder)`.
    """
    root = _root(net, wrapped=True)
    scaler = scaling_of(root)
    if scaler is None:
        yield net
        return
    _take_off(root, scaler)
    try:
        yield net
    finally:
        _put_on(root, scaler)


@contextmanager
def former_scaling_on_failure(root: nn.Module) -> Iterator[None]:
    """Where the block fails, the network is scaled again as it was before."""
    former = scaling_of(root)
    try:
        yield
    except Exception:
        now = scaling_of(root)
        if now is not former:
            if now is not None:
                _take_off(root, now)
            if former is not None:
                _put_on(root, former)
        raise


def parameters(net: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that the scaling added (LS, ReZero), for an optimizer group of their own."""
    scaler = scaling_of(_root(net, wrapped=True))
    return iter(()) if scaler is None else scaler.parameters()


def scaling_of(net: nn.Module) -> SkipScaling | None:
    """The module that scales `net`, or None for an unscaled network."""
    scaler = getattr(net, NAME, None)
    if isinstance(getattr(scaler, "original_module", None), SkipScaling):
        raise ScaleLongError(
            f"PEFT's modules_to_save made a copy of {NAME!r} that the network does not run; leave it out, and give "
            "scalelong.parameters(net) to the optimizer beside the adapter's parameters"
        )
    return scaler if isinstance(scaler, SkipScaling) else None


def sites_of(net: nn.Module) -> tuple[list[Site], str]:
    """The sites and the placement in force: those it was scaled with, or those found in an unscaled network."""
    scaler = scaling_of(net)
    if scaler is not None and scaler.sites:
        return list(scaler.sites), scaler.placement
    return find_sites(net), "join"


def _like(root: nn.Module, scaler: SkipScaling) -> SkipScaling:
    """On the network's device, in its precision and mode."""
    like = next((p for p in root.parameters() if p.is_floating_point()), None)
    if like is not None:
        scaler.to(device=like.device, dtype=like.dtype)
    return scaler.train(root.training)


def _put_on(root: nn.Module, scaler: SkipScaling) -> None:
    """Hook the scaling module in and register it; from now on it moves, trains and is saved with the network."""
    if hasattr(root, NAME):
        raise ScaleLongError(
            f"{type(root).__name__} has an attribute {NAME!r} of its own, the name under which a scaling is registered"
        )
    try:
        if scaler.spec.acts_on == "blocks":
            attach_branches(root, _branches(root, scaler.spec), scaler)
        else:
            attach(root, list(scaler.sites), scaler, scaler.placement)
    except Exception:
        detach(root, scaler)
        raise
    root.add_module(NAME, scaler)
    _note_in_config(root, scaler.spec)


def _take_off(root: nn.Module, scaler: SkipScaling) -> None:
    detach(root, scaler)
    delattr(root, NAME)
    _note_in_config(root, NoScaling())


def _branches(root: nn.Module, spec: Scaling) -> list[list[str]]:
    branches = find_branches(root)
    if branches is None:
        raise ScaleLongError(
            f"{spec.kind!r} scales block outputs and is for U-ViT (blocks with attn and mlp), not {type(root).__name__}"
        )
    return branches


def _root(net: Any, wrapped: bool = False, doing: str = "apply") -> nn.Module:
    """The network itself, inside PEFT's wrapper. Wrappers that must come after scaling are refused, or looked into."""
    if not isinstance(net, nn.Module):
        raise ScaleLongError(
            f"a network (torch.nn.Module) is scaled, not {type(net).__name__}; of a diffusers pipeline take pipe.unet"
        )
    what = _wrapper(net)
    if what is not None and wrapped:
        inner = getattr(net, "_orig_mod", getattr(net, "module", net))
        if inner is not net:
            return _root(inner, wrapped=True)
    elif not wrapped:
        for path, module in net.named_modules():
            if (what := _wrapper(module)) is not None:
                _refuse(what, f"its part {path!r}" if path else "the network", doing)
    base: Any = getattr(net, "get_base_model", None)
    is_peft = any(cls.__name__ == "PeftModel" for cls in type(net).__mro__)
    return _root(base(), wrapped, doing) if is_peft and base is not None else net


def _wrapper(module: nn.Module) -> str | None:
    """What was put around a module that hooks no longer reach, or that has counted its parameters already."""
    for cls in type(module).__mro__:
        if cls.__name__ in _WRAPPERS:
            return _WRAPPERS[cls.__name__]
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return "torch.compile" if compiled or hasattr(module.forward, "_torchdynamo_orig_callable") else None


def _refuse(what: str, whole_or_part: str, doing: str) -> None:
    if doing == "remove":
        order = "take the scaling off the network itself, then wrap it anew"
    else:
        order = f"the right order is scalelong.apply(net, scaling) first, then {what} and the optimizer"
    raise ScaleLongError(f"{whole_or_part} is wrapped by {what} already; {order}")


_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP (fully_shard)",
    "OptimizedModule": "torch.compile",
}


def _give_notice(spec: Scaling, n: int) -> None:
    """A skip that is all but cut is a warning; Σκ² outside the paper's range is information, for the log."""
    for notice in spec.notices(n):
        if notice.level == "warning":
            warnings.warn(f"{notice} (scalelong.estimate_kappa proposes one)", ScalingWarning, stacklevel=3)
        else:
            logging.getLogger("scalelong").info("%s", notice)


def _note_in_config(root: nn.Module, spec: Scaling) -> None:
    """A network whose own config has a `scaling` (our U-ViT) keeps it true, so that it is saved."""
    config = getattr(root, "config", None)
    register: Any = getattr(root, "register_to_config", None)
    if register is not None and config is not None and "scaling" in config:
        register(scaling=spec.to_dict())
