"""Scale the long skips of a network in place, and remove the scaling."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from scalelong.errors import ScalingStateError, ScalingWarning, UnsupportedNetworkError, invalid, unknown
from scalelong.scaling import ExplicitScaling, Scaling, SkipScaling, SkipShape, parse_scaling
from scalelong.skips.conditioning import attach_conditioning, bind
from scalelong.skips.finders import find_branches, find_sites
from scalelong.skips.found import sites_from
from scalelong.skips.hooks import (
    NAME,
    BranchHook,
    FirstPassHook,
    LeaveTimestep,
    attach,
    detach,
    scales_in_forward,
    scaling_of,
    timestep_hook,
)
from scalelong.skips.joins import wrong_join
from scalelong.skips.records import record_scaling, recorded_scaling
from scalelong.skips.sites import Site

Net = TypeVar("Net", bound=nn.Module)


def apply(
    net: Net,
    scaling: Scaling | str | dict[str, Any],
    *,
    example: Any = None,
    sites: Iterable[Site | str] | None = None,
    placement: str = "join",
    replace: bool = False,
) -> Net:
    """Scale the long skips of `net` in place and return it.

    Call it before you build the optimizer (LS has parameters) and before `torch.compile`, DDP or FSDP. The initial
    weights of LS depend on torch's random state on the CPU, which is the same after the call as before.

    Args:
        net: A network that scalelong knows or that declares `long_skips`; any other one together with `example`.
        scaling: A spec such as `ConstantScaling(0.7)` or `LearnableScaling()`, or its short name.
        example: The arguments of one call: a tuple `(x, t)`, a dictionary by name, or both as a pair. The network runs
            once to find its long skips (see `find_skips`), or to check and complete `sites`. `ConstantScaling("auto")`
            chooses kappa on it: pass noisy training images.
        sites: The long skips of an unknown network, outermost first (see `Site` and `register_adapter`).
        placement: "join" scales the skip where it joins the backbone. "after_norm" scales it after the normalization
            of the concatenation, for networks whose norm would cancel κ_i (`describe` measures that).
        replace: Replace an existing scaling instead of raising an error.

    Returns:
        `net` itself.

    Examples:
        >>> from diffusers import UNet2DModel
        >>> blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        >>> net = UNet2DModel(sample_size=8, block_out_channels=(32, 32), layers_per_block=1, **blocks)
        >>> net = scalelong.apply(net, scalelong.ConstantScaling(0.7))
        >>> [round(row.coefficient, 3) for row in scalelong.describe(net).rows]
        [1.0, 0.7, 0.49, 0.343]
    """
    root = unwrapped(net)
    spec = parse_scaling(scaling)
    if spec.needs_example and example is None:
        hint = f"build the network without a scaling, then scalelong.apply(net, {spec.kind!r}, …, example=(x, t))"
        hint = hint.replace(f"{spec.kind!r}, …", 'ConstantScaling("auto")') if spec.unresolved else ""
        raise invalid("example", f"the arguments of one call, (x, t), on which {spec} is measured", None, hint)
    _warn_of_phase(root, spec)
    return apply_quietly(net, spec, example=example, sites=sites, placement=placement, replace=replace)


def apply_quietly(
    net: Net,
    spec: Scaling,
    *,
    example: Any = None,
    sites: Iterable[Site | str] | None = None,
    placement: str = "join",
    replace: bool = False,
) -> Net:
    """`apply` for code that knows the phase: it loads a scaling that was trained."""
    root = unwrapped(net)
    if placement not in (placements := ("join", "after_norm")):
        raise unknown("placement", placement, placements)
    former = scaling_of(root)
    if former is not None and not replace:
        hint = "call remove(net) first or pass replace=True"
        raise ScalingStateError(f"{type(root).__name__} is already scaled with {former.spec}; {hint}")
    with restore_on_failure(root):
        if former is not None:
            _unregister(root, former)
        if spec.acts_on == "blocks":
            scaler = spec.build([SkipShape(None)] * len(find_branches(root, spec.kind)))
        else:
            found = sites_from(root, sites, example)
            if spec.is_identity:
                record_scaling(root, None)
                return net
            _check_norms(found, placement, looked_for=sites is None or example is not None)
            if spec.unresolved:
                from scalelong.skips.auto import auto_scaling

                spec = auto_scaling(root, found, placement, example)
            _check_joins(found, spec, placement)
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # LS is drawn, the random state is kept
                scaler = spec.build([site.shape for site in found])
                bind(root, scaler)
            scaler.placed(tuple(found), placement)
            for notice in spec.notices(len(found)):  # warn of a skip that is almost cut, log a Σκ² out of range
                if notice.level == "warning":
                    text = f"{notice} (scalelong.estimate_kappa proposes a value)"
                    warnings.warn(text, ScalingWarning, stacklevel=2)
                else:
                    logging.getLogger("scalelong").info("%s", notice)
        like = next((p for p in root.parameters() if p.is_floating_point()), None)
        if like is not None:  # a dtype of storage only, such as float8, is none to compute in
            scaler.to(device=like.device, dtype=like.dtype if like.dtype.itemsize > 1 else None)
        scaler.train(root.training)
        if spec.freezes:
            scaler.frozen = tuple(name for name, parameter in root.named_parameters() if parameter.requires_grad)
        if spec.needs_example and example is not None:
            from scalelong.skips.measured import register_measured

            register_measured(root, scaler, example, _register)
        else:
            _register(root, scaler)
    return net


def set_coefficients(net: Net, scaling: Scaling | str | dict[str, Any] | Sequence[float]) -> Net:
    """Change the constants of a scaled network between two passes, and return it.

    No hook is touched, and a compiled network compiles nothing again.

    Args:
        net: A network scaled with constants (uniform, CS, explicit, Skip-Tuning, FreeU), compiled or not.
        scaling: A spec such as `SkipTuning(0.7)` or `FreeU.named("sdxl")`, or a list of κ_1…κ_N, outermost first.

    Returns:
        `net` itself.

    Examples:
        >>> net = scalelong.StackedUNet(32, 3, scaling=scalelong.ConstantScaling(0.7))
        >>> net = scalelong.set_coefficients(net, [1, 0.9, 0.8])
        >>> [row.coefficient for row in scalelong.describe(net).rows]
        [1.0, 0.9, 0.8]
    """
    root = scaled_root(net)
    scaler = scaling_of(root)
    if scaler is None:
        raise ScalingStateError(f"{type(root).__name__} is not scaled; call scalelong.apply first")
    listed = isinstance(scaling, Sequence) and not isinstance(scaling, str)
    spec = ExplicitScaling(scaling) if listed else parse_scaling(scaling)  # type: ignore[arg-type]
    scaler.set(spec, len(scaler.sites))
    record_scaling(root, scaler)
    return net


def _warn_of_phase(root: nn.Module, spec: Scaling) -> None:
    """Warn if the network's mode is that of another phase than the one the scaling is meant for."""
    other = {"training": not root.training, "fine-tuning": not root.training, "inference": root.training}
    recorded = recorded_scaling(root)
    if spec.is_identity or not other.get(spec.phase, False) or (recorded or {}).get("scaling") == spec.to_dict():
        return
    name = type(spec).__name__
    text = f"{name} is an inference-time method, but the network is in training mode: call net.eval() first"
    if spec.phase != "inference":
        text = (
            f"{name} is a {spec.phase}-time method, but the network is in eval mode: call net.train() before apply and "
            "train it; for sampling a trained network as it is, use SkipTuning or FreeU"
        ).replace("fine-tuning-time", "fine-tuning")
    warnings.warn(text, ScalingWarning, stacklevel=3)


def _check_joins(sites: list[Site], spec: Scaling, placement: str) -> None:
    if placement == "after_norm" and not spec.factor:
        problem = f"{spec} is not a factor on the skip, so it cannot act after the norm"
        raise UnsupportedNetworkError(f'{problem}; use placement="join"')
    for i, site in enumerate(sites, start=1):
        if site.op is not None and site.op not in spec.joins:
            raise wrong_join(spec, i, site.path, site.op)


def _check_norms(sites: list[Site], placement: str, looked_for: bool) -> None:
    missing = [i for i, site in enumerate(sites, start=1) if site.norm is None]
    if placement == "after_norm" and missing and not looked_for:
        problem = f"site {missing[0]} names none, and without an example none was looked for"
        hint = "pass example=(x, t) to look for it, or Site(norm=…, shortcut=…)"
        raise UnsupportedNetworkError(f'placement="after_norm" requires the norm after each join: {problem}; {hint}')


def remove(net: Net) -> Net:
    """Remove the scaling; the network is bit for bit what it was.

    Of an unscaled network that was loaded, it clears the scaling that its config still names.

    Like `parameters`, `unscaled`, `describe` and `save_scaling`, it also takes a module that holds the scaled network.

    Args:
        net: The network.

    Returns:
        `net` itself.

    Examples:
        >>> net, x = scalelong.StackedUNet(32, 3), torch.randn(2, 32)
        >>> before = net(x)
        >>> scaled = scalelong.apply(net, scalelong.ConstantScaling(0.5))(x)
        >>> torch.equal(scaled, before), torch.equal(scalelong.remove(net)(x), before)
        (False, True)
    """
    root = scaled_root(net, allow_wrappers=False)
    if (scaler := scaling_of(root)) is not None:
        _unregister(root, scaler)
    else:
        record_scaling(root, None)
    return net


@contextmanager
def unscaled(net: Net) -> Iterator[Net]:
    """Remove the scaling within a `with` block, then put the same module back, LS weights included.

    Use it to save with a library that expects only its own weights: `with unscaled(unet): pipe.save_pretrained(…)`.

    Args:
        net: The network.

    Returns:
        A context manager that yields `net`.

    Examples:
        >>> net = scalelong.StackedUNet(32, 3, scaling=scalelong.LearnableScaling())
        >>> with scalelong.unscaled(net):
        ...     inside = len(net.state_dict())
        >>> inside < len(net.state_dict())
        True
    """
    root = scaled_root(net)
    scaler = scaling_of(root)
    if scaler is not None:
        _unregister(root, scaler)
    try:
        yield net
    finally:
        if scaler is not None:
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
    """Return the parameters that the scaling added (LS, gates, adapters, …), for an optimizer group of their own.

    Args:
        net: The scaled network.

    Returns:
        An iterator over parameters; empty for constants.

    Examples:
        >>> net = scalelong.StackedUNet(32, 3, scaling=scalelong.LearnableScaling())
        >>> own = set(scalelong.parameters(net))
        >>> groups = [{"params": [p for p in net.parameters() if p not in own]}, {"params": list(own), "lr": 1e-3}]
        >>> optimizer = torch.optim.AdamW(groups, lr=2e-4)
    """
    scaler = scaling_of(scaled_root(net))
    return iter(()) if scaler is None else scaler.parameters()


def sites_of(net: nn.Module) -> tuple[list[Site], str]:
    """Return the sites and the placement that a network is scaled with, or would be by default."""
    scaler = scaling_of(net)
    if scaler is not None and scaler.sites:
        return list(scaler.sites), scaler.placement
    return find_sites(net), "join"


def scaled_root(net: Any, allow_wrappers: bool = True) -> nn.Module:
    """Return the scaled network: `net` itself, the one inside DDP and the like, or the one that `net` holds.

    If nothing in `net` is scaled, it is returned without its wrappers. Two scaled networks in it raise an error.
    """
    root = unwrapped(net, allow_wrappers)
    if scaling_of(root) is not None:
        return root
    scaled = [(path, module) for path, module in root.named_modules() if scaling_of(module) is not None]
    if len(scaled) > 1:
        paths = ", ".join(f"net.{path}" for path, _ in scaled)
        raise ScalingStateError(f"{type(root).__name__} holds {len(scaled)} scaled networks; pass one of them: {paths}")
    return scaled[0][1] if scaled else root


def unwrapped(net: Any, allow_wrappers: bool = False) -> nn.Module:
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
                raise ScalingStateError(
                    f"{what} is already wrapped by {wrapper}; call scalelong.apply(net, scaling) first, then {wrapper} "
                    "and the optimizer; to remove a scaling, unwrap the network, then wrap it again"
                )
    if any(cls.__name__ == "PeftModel" for cls in type(net).__mro__):
        base: Any = net.get_base_model
        return unwrapped(base(), allow_wrappers)
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


def _register(root: nn.Module, scaler: SkipScaling) -> None:
    """Attach the scaling module; from now on it moves, trains and is saved with the network."""
    if hasattr(root, NAME):
        raise ScalingStateError(f"{type(root).__name__} has an attribute {NAME!r} of its own; rename it")
    try:
        if scaler.spec.acts_on == "blocks":
            for index, paths in enumerate(find_branches(root, scaler.spec.kind), start=1):
                for path in paths:
                    root.get_submodule(path).register_forward_hook(BranchHook(scaler, index))
        elif scaler.placement != "join" or not scales_in_forward(root, list(scaler.sites)):
            attach(root, list(scaler.sites), scaler, placement=scaler.placement)
        attach_conditioning(root, scaler)
        if scaler.timed:
            root.register_forward_pre_hook(timestep_hook(root, scaler), with_kwargs=True)
            root.register_forward_hook(LeaveTimestep(scaler), always_call=True)
        if scaler.sites:
            root.register_forward_hook(FirstPassHook(scaler))
    except Exception:
        detach(root, scaler)
        raise
    _require_grad(root, scaler.frozen, False)
    root.add_module(NAME, scaler)
    record_scaling(root, scaler)


def _unregister(root: nn.Module, scaler: SkipScaling) -> None:
    detach(root, scaler)
    delattr(root, NAME)
    if scaler.frozen:  # what the user has unfrozen since is the user's: `unscaled` must not freeze it again
        parameters = dict(root.named_parameters())
        scaler.frozen = tuple(
            name for name in scaler.frozen if name not in parameters or not parameters[name].requires_grad
        )
        _require_grad(root, scaler.frozen, True)
    record_scaling(root, None)


def _require_grad(root: nn.Module, names: tuple[str, ...], value: bool) -> None:
    parameters = dict(root.named_parameters()) if names else {}
    for name in names:
        if name in parameters:
            parameters[name].requires_grad_(value)
