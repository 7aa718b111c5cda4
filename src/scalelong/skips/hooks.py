"""How κ acts: through `scale_skip` in networks that call it in `forward`, through forward hooks in all others.

Hooks are callable objects, never closures, so that they copy, pickle and compile with the network. Each holds an
*actor*, an object with a method `scale(skip, i) -> Tensor`: the scaling module, or a probe that measures.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong.errors import ScalingStateError, UnsupportedNetworkError, invalid
from scalelong.scaling import SkipScaling, SkipShape
from scalelong.skips.sites import Site, declared_sites

NAME = "skip_scaling"  # the attribute of a network's root under which its one scaling module is registered


Handle = RemovableHandle  # of a hook or of an entry of _TAPS
# Probes of networks that scale in `forward`: (network, actor, whether it acts before the network's own scaling).
_TAPS: OrderedDict[int, tuple[nn.Module, Any, bool]] = OrderedDict()


def scale_skip(net: nn.Module, skip: Tensor, i: int) -> Tensor:
    """Return κ_i·skip. Call it in the `forward` of a network that declares its `long_skips`.

    `scalelong.apply` registers the module that computes κ_i. Without one, the skip is returned unchanged.

    Args:
        net: The network, usually `self`. Its attribute `long_skips` holds the channel width (or `SkipShape`) of each
            long skip, outermost first.
        skip: The skip tensor, as the encoder produced it.
        i: Index of the skip: 1 is the outermost, N the innermost.
    """
    declared: Any = getattr(net, "long_skips", None)
    if declared is None:
        hint = "set self.long_skips = (C_1, …, C_N), the channel widths of its long skips, outermost first"
        raise UnsupportedNetworkError(f"{type(net).__name__} calls scale_skip but has no long_skips; {hint}")
    if not 1 <= i <= len(declared):
        raise invalid("i", f"between 1 (outermost) and {len(declared)} (innermost)", i)
    entry = declared[i - 1]
    shape = entry if isinstance(entry, (Site, SkipShape)) else SkipShape(entry)
    if shape.channels is not None and skip.shape[shape.dim] != shape.channels:
        declaration = f"{type(net).__name__}.long_skips declares {shape.channels}"
        raise UnsupportedNetworkError(f"long skip {i} has {skip.shape[shape.dim]} channels, but {declaration}")
    scaler = scaling_of(net)
    own = [scaler] if scaler is not None and scaler.spec.acts_on == "skips" else []
    taps = [] if torch.compiler.is_compiling() else [tap for tap in _TAPS.values() if tap[0] is net]
    before = [actor for _, actor, first in taps if first]
    after = [actor for _, actor, first in taps if not first]
    for actor in (*before, *own, *after):
        skip = actor.scale(skip, i)  # κ_i·x_i
    return skip


def scaling_of(net: nn.Module) -> SkipScaling | None:
    """Return the module that scales `net`, or None for an unscaled network."""
    scaler = net._modules.get(NAME)
    if isinstance(getattr(scaler, "original_module", None), SkipScaling):
        hint = "leave it out and pass scalelong.parameters(net) to the optimizer"
        raise ScalingStateError(f"PEFT's modules_to_save made a copy of {NAME!r} that does not run; {hint}")
    return scaler if isinstance(scaler, SkipScaling) else None


@dataclass(frozen=True)
class Argument:
    """One argument of a module's `forward`, however the caller passes it."""

    name: str | None
    position: int | None

    @staticmethod
    def of(module: nn.Module, argument: int | str) -> Argument:
        """Locate `argument` (a name or a position) in the signature of `module.forward`."""
        parameters = list(inspect.signature(module.forward).parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        if isinstance(argument, int):
            if argument < len(named):
                return Argument(named[argument], argument)
            if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                return Argument(None, argument)
        elif argument in named:
            return Argument(argument, named.index(argument))
        elif any(p.name == argument and p.kind is p.KEYWORD_ONLY for p in parameters):
            return Argument(argument, None)
        known = ", ".join(named) or "none"
        raise UnsupportedNetworkError(f"{type(module).__name__}.forward has no argument {argument!r}; it has {known}")

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return its value in a call, None if it is absent."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if self.position is not None and self.position < len(args) else None

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with another value."""
        if self.name is not None and self.name in kwargs:
            return args, {**kwargs, self.name: value}
        assert self.position is not None
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs

    def __str__(self) -> str:
        return repr(self.position if self.name is None else self.name)


@dataclass(frozen=True)
class Part:
    """The part of a value that is long skip `index`."""

    index: int
    item: int | None
    trailing: int | None  # number of trailing channels, None for the whole tensor
    dim: int

    def scaled(self, x: Any, actor: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise UnsupportedNetworkError(f"long skip {self.index} must be a tensor, got {type(x).__name__}")
        if self.trailing is None:
            return actor.scale(x, self.index)
        backbone, skip = split_trailing(x, self.trailing, self.dim)
        scaled = actor.scale(skip, self.index)
        return x if scaled is skip else torch.cat([backbone, scaled], dim=self.dim)


@dataclass(eq=False)
class SkipHook:
    """Base class of the hooks, by which `detach` recognizes them."""

    actor: Any


@dataclass(eq=False)
class ArgumentHook(SkipHook):
    """A forward pre-hook that scales the long skips within one argument of a call."""

    argument: Argument
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"argument {self.argument}, which holds long skip {self.parts[0].index}"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value, first = self.argument.get(args, kwargs), self.parts[0]
        if value is None:
            raise UnsupportedNetworkError(f"{type(module).__name__} was called without {self}")
        if first.item is None:
            return self.argument.put(args, kwargs, first.scaled(value, self.actor))
        if not isinstance(value, (tuple, list)):
            raise UnsupportedNetworkError(f"{self}, must be a tuple or list, got {type(value).__name__}")
        items = list(value)
        for part in self.parts:
            assert part.item is not None
            if not -len(items) <= part.item < len(items):
                skip = f"long skip {part.index} is item {part.item}"
                raise UnsupportedNetworkError(f"argument {self.argument} has {len(items)} items, but {skip}")
            items[part.item] = part.scaled(items[part.item], self.actor)
        return self.argument.put(args, kwargs, tuple(items) if isinstance(value, tuple) else items)


@dataclass(eq=False)
class NormHook(SkipHook):
    """A forward hook that scales the skip's channels at a norm's output; κ_i is computed from the norm's input."""

    part: Part

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self.part.trailing is not None
        _, skip = split_trailing(args[0], self.part.trailing, self.part.dim)
        kappa = self.actor(skip, self.part.index)
        if isinstance(kappa, float) and kappa == 1.0:
            return output
        backbone, normed = split_trailing(output, self.part.trailing, self.part.dim)
        return torch.cat([backbone, normed * kappa], dim=self.part.dim)


@dataclass(eq=False)
class BranchHook(SkipHook):
    """A forward hook that scales the output of a residual branch (Table 3's baselines)."""

    index: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.actor.scale(output, self.index)


def split_trailing(x: Tensor, channels: int, dim: int) -> tuple[Tensor, Tensor]:
    """Split a concatenation into the backbone's and the skip's channels."""
    if x.shape[dim] <= channels:
        raise UnsupportedNetworkError(f"{x.shape[dim]} concatenated channels cannot end with a skip of {channels}")
    backbone, skip = x.split([x.shape[dim] - channels, channels], dim=dim)
    return backbone, skip


def attach(
    net: nn.Module, sites: list[Site], actor: Any, *, placement: str = "join", before: bool = False
) -> list[Handle]:
    """Let `actor` act on the skips at `sites` (outermost first), after the network's own scaling or `before` it."""
    if placement == "after_norm":
        return [handle for i, site in enumerate(sites, 1) for handle in _attach_after_norm(net, site, i, actor)]
    if declared_sites(net) is not None:
        handle = RemovableHandle(_TAPS)
        _TAPS[handle.id] = (net, actor, before)
        return [handle]
    calls: dict[tuple[str, int | str], list[Part]] = {}  # one hook for all skips in one argument
    for index, site in enumerate(sites, start=1):
        part = Part(index, site.item, site.channels if site.trailing else None, site.dim)
        calls.setdefault((site.called, site.argument), []).append(part)
    handles: list[Handle] = []
    for (path, argument), parts in calls.items():
        module = net.get_submodule(path)
        hook = ArgumentHook(actor, Argument.of(module, argument), tuple(parts))
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=before))
    return handles


def _attach_after_norm(net: nn.Module, site: Site, index: int, actor: Any) -> list[Handle]:
    if site.norm is None:
        problem = f"requires a norm after the join of long skip {index}, but {site.path} has none"
        raise UnsupportedNetworkError(f'placement="after_norm" {problem}; use placement="join"')
    part = Part(index, None, site.channels, site.dim)
    handles: list[Handle] = [net.get_submodule(site.norm).register_forward_hook(NormHook(actor, part))]
    if site.shortcut is not None:
        hook = ArgumentHook(actor, Argument(None, 0), (part,))
        handles.append(net.get_submodule(site.shortcut).register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def detach(net: nn.Module, actor: Any) -> None:
    """Remove every hook of `actor` from the network."""
    for module in net.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, kind)
            for key in [k for k, hook in hooks.items() if isinstance(hook, SkipHook) and hook.actor is actor]:
                for table in (hooks, getattr(module, f"{kind}_with_kwargs"), module._forward_hooks_always_called):
                    table.pop(key, None)
