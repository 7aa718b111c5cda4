"""How κ acts: through `scale_skip` in networks that call it in `forward`, through forward hooks in all others.

Hooks are callable objects, never closures, so that they copy, pickle and compile with the network. Each holds an
*actor*, an object with a method `scale(skip, i) -> Tensor`: the scaling module, or a probe that measures. An actor that
is `two_sided` has `join(skip, backbone, i)` instead, which returns both, and acts at the operation that joins them.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong._modules import parameters_of
from scalelong.errors import ScalingStateError, ScalingWarning, UnsupportedNetworkError, invalid
from scalelong.scaling import SkipScaling, SkipShape
from scalelong.skips.joins import (
    EnterChild,
    JoinHook,
    LeaveChild,
    LeaveJoin,
    LeavePass,
    PassHook,
    SkipHook,
    act,
    frontier,
    this_call,
)
from scalelong.skips.sites import ROOT, Site, declared_sites

NAME = "skip_scaling"  # the attribute of a network's root under which its one scaling module is registered


Handle = RemovableHandle  # of a hook or of an entry of _TAPS
# Probes of networks that scale in `forward`: (network, actor, whether it acts before the network's own scaling).
_TAPS: OrderedDict[int, tuple[nn.Module, Any, bool]] = OrderedDict()


@overload
def scale_skip(net: nn.Module, skip: Tensor, i: int) -> Tensor: ...
@overload
def scale_skip(net: nn.Module, skip: Tensor, i: int, backbone: Tensor) -> tuple[Tensor, Tensor]: ...
def scale_skip(net: nn.Module, skip: Tensor, i: int, backbone: Tensor | None = None) -> Any:
    """Return κ_i·skip. Call it in the `forward` of your own network.

    `scalelong.apply` registers the module that computes κ_i. Without one, the skip is returned unchanged. With the
    backbone, methods that act on both tensors of a join work too: `skip, x = scale_skip(self, skip, i, x)`.

    Args:
        net: The network, usually `self`. Its attribute `long_skips` holds the channel width (or `SkipShape`) of each
            long skip, outermost first; without it, pass `apply` an example.
        skip: The skip tensor, as the encoder produced it.
        i: Index of the skip: 1 is the outermost, N the innermost.
        backbone: The tensor that the skip is joined with.

    Returns:
        The scaled skip; with `backbone` the pair (skip, backbone).

    Examples:
        >>> class Net(torch.nn.Module):
        ...     long_skips = (8,)
        ...     def forward(self, x):
        ...         return torch.tanh(x) + scalelong.scale_skip(self, x, 1)
        >>> net = scalelong.apply(Net(), scalelong.UniformScaling(0.5))
        >>> net(torch.zeros(1, 8)).shape
        torch.Size([1, 8])
    """
    scaler = scaling_of(net)
    declared: Any = getattr(net, "long_skips", None)
    if declared is None:  # then an example has found them
        declared = scaler.sites if scaler is not None else None
    if declared is not None:
        if not 1 <= i <= len(declared):
            raise invalid("i", f"between 1 (outermost) and {len(declared)} (innermost)", i)
        entry = declared[i - 1]
        shape = entry if isinstance(entry, (Site, SkipShape)) else SkipShape(entry)
        if shape.channels is not None and width_of(skip, shape.dim) != shape.channels:
            declaration = f"{type(net).__name__}.long_skips declares {shape.channels}"
            raise UnsupportedNetworkError(f"long skip {i} has {skip.shape[shape.dim]} channels, but {declaration}")
    own = [scaler] if scaler is not None and scaler.acts_on == "skips" else []
    taps = [] if torch.compiler.is_compiling() else [tap for tap in _TAPS.values() if tap[0] is net]
    before = [actor for _, actor, first in taps if first]
    after = [actor for _, actor, first in taps if not first]
    for actor in (*before, *own, *after):
        skip, backbone = act(actor, skip, backbone, i)  # κ_i·x_i
    return skip if backbone is None else (skip, backbone)


def scaling_of(net: nn.Module) -> SkipScaling | None:
    """Return the module that scales `net`, or None for an unscaled network."""
    scaler = net._modules[NAME] if NAME in net._modules else None  # noqa: SIM401  (scripted modules)
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
        parameters = parameters_of(module).values()
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
    site: Site

    def scaled(self, x: Any, actor: Any) -> Tensor:
        site = self.site
        if not isinstance(x, Tensor):
            raise UnsupportedNetworkError(f"long skip {self.index} must be a tensor, got {type(x).__name__}")
        if not site.trailing and not site.leading:
            if site.channels is not None and width_of(x, site.dim) != site.channels:
                problem = f"has shape {tuple(x.shape)}: axis {site.dim} must have its {site.channels} channels"
                raise UnsupportedNetworkError(f"long skip {self.index} {problem}")
            return actor.scale(x, self.index)
        assert site.channels is not None
        backbone, skip = split_joined(x, site.channels, site.dim, site.leading)
        scaled, other = act(actor, skip, backbone, self.index)
        if scaled is skip and other is backbone:
            return x
        assert other is not None
        return torch.cat([scaled, other] if site.leading else [other, scaled], dim=site.dim)


@dataclass(eq=False)
class ArgumentHook(SkipHook):
    """A forward pre-hook that scales the long skips within one argument of a call."""

    argument: Argument
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"argument {self.argument}, which holds long skip {self.parts[0].index}"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self.parts
        if parts[0].site.calls is not None:
            chosen = {
                i for i, _ in this_call(self.actor, parts[0].site.called, tuple((p.index, p.site) for p in parts))
            }
            parts = tuple(part for part in parts if part.index in chosen)
            if not parts:
                return None
        value, first = self.argument.get(args, kwargs), parts[0]
        if value is None:
            raise UnsupportedNetworkError(f"{type(module).__name__} was called without {self}")
        if first.site.item is None:
            return self.argument.put(args, kwargs, first.scaled(value, self.actor))
        if not isinstance(value, (tuple, list, dict)):
            raise UnsupportedNetworkError(f"{self}, must be a tuple, list or dict, got {type(value).__name__}")
        items: Any = _copied(value)
        for part in parts:
            item = part.site.item
            if item not in (items if isinstance(value, dict) else range(-len(items), len(items))):
                has = f"the items {list(items)}" if isinstance(value, dict) else f"{len(items)} items"
                skip = f"long skip {part.index} is item {item!r}"
                raise UnsupportedNetworkError(f"argument {self.argument} has {has}, but {skip}")
            items[item] = part.scaled(items[item], self.actor)
        if isinstance(value, tuple):
            items = value._make(items) if hasattr(value, "_make") else tuple(items)  # a named tuple stays one
        return self.argument.put(args, kwargs, items)


def _copied(value: Any) -> Any:
    """Return a copy to change: a list of a tuple, otherwise the same kind (an OrderedDict, diffusers' outputs)."""
    if isinstance(value, tuple):
        return list(value)
    return type(value)(value) if type(value) in (list, dict) else copy.copy(value)


@dataclass(eq=False)
class NormHook(SkipHook):
    """A forward hook that scales the skip's channels at a norm's output; κ_i is computed from the norm's input."""

    part: Part
    argument: Argument

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        site = self.part.site
        assert site.channels is not None
        _, skip = split_joined(self.argument.get(args, kwargs), site.channels, site.dim, site.leading)
        kappa = self.actor(skip, self.part.index)
        if isinstance(kappa, float) and kappa == 1.0:
            return output
        backbone, normed = split_joined(output, site.channels, site.dim, site.leading)
        parts = [normed * kappa, backbone] if site.leading else [backbone, normed * kappa]
        return torch.cat(parts, dim=site.dim)


@dataclass(eq=False)
class BranchHook(SkipHook):
    """A forward hook that scales the output of a residual branch (Table 3's baselines)."""

    index: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.actor.scale(output, self.index)


@dataclass(eq=False)
class TimestepHook(SkipHook):
    """A forward pre-hook of the network that passes the timestep to a scaling that depends on it."""

    argument: Argument

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        t = self.argument.get(args, kwargs)
        if t is None:
            raise UnsupportedNetworkError(f"{type(module).__name__} was called without a timestep ({self.argument})")
        self.actor.observe_timestep(t)


@dataclass(eq=False)
class LeaveTimestep(SkipHook):
    """A forward hook of the network, called always: a call that its hooks do not see must not use an old timestep."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():  # backward recomputes checkpointed blocks, with the timestep of this pass
            self.actor.forget_timestep()


TIMES = ("timestep", "timesteps", "t", "time", "times", "noise_labels", "sigma")  # names of that argument


def timestep_hook(net: nn.Module, actor: Any) -> TimestepHook:
    """Return the hook for a network whose `forward` has a timestep."""
    names = list(parameters_of(net))
    name = next((name for name in TIMES if name in names), None)
    if name is None:
        known = f"{type(net).__name__}.forward has {', '.join(names)}; a timestep is one of {', '.join(TIMES)}"
        raise UnsupportedNetworkError(f"{actor.spec} acts within a range of timesteps, but {known}")
    return TimestepHook(actor, Argument.of(net, name))


@dataclass(eq=False)
class FirstPassHook(SkipHook):
    """A forward hook of the network that warns after the first training pass if it did not reach a long skip."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        reached, self.actor.reached = self.actor.reached, None
        if reached is None:
            return
        missed = [(i, site) for i, site in enumerate(self.actor.sites, start=1) if i not in reached]
        if missed:
            where = ", ".join(f"{i} ({site.path})" for i, site in missed[:4]) + (", …" if len(missed) > 4 else "")
            text = (
                f"the first training pass did not reach long skip {where}: κ_i does not act there and LS learns nothing"
            )
            hint = "name the module that is called with the skip (scalelong.describe(net, *example) shows the sites)"
            warnings.warn(f"{text}; {hint}", ScalingWarning, stacklevel=2)


def width_of(x: Tensor, dim: int) -> int:
    """Return the size of an axis, after checking that the tensor has it."""
    if not -x.ndim <= dim < x.ndim:
        raise UnsupportedNetworkError(f"a tensor of shape {tuple(x.shape)} has no axis {dim} for the channels")
    return x.shape[dim]


def split_joined(x: Tensor, channels: int, dim: int, leading: bool = False) -> tuple[Tensor, Tensor]:
    """Split a concatenation into the backbone's and the skip's channels; `leading`: it starts with the skip."""
    width = width_of(x, dim)
    if width <= channels:
        place = "start" if leading else "end"
        raise UnsupportedNetworkError(f"{width} concatenated channels cannot {place} with a skip of {channels}")
    if leading:
        skip, backbone = x.split([channels, width - channels], dim=dim)
    else:
        backbone, skip = x.split([width - channels, channels], dim=dim)
    return backbone, skip


def attach(
    net: nn.Module, sites: list[Site], actor: Any, *, placement: str = "join", before: bool = False
) -> list[Handle]:
    """Let `actor` act on the skips at `sites` (outermost first), after the network's own scaling or `before` it."""
    if placement == "after_norm":
        return [handle for i, site in enumerate(sites, 1) for handle in _attach_after_norm(net, site, i, actor)]
    if scales_in_forward(net, sites):
        handle = RemovableHandle(_TAPS)
        _TAPS[handle.id] = (net, actor, before)
        return [handle]
    own = scaling_of(net)
    at_operation = getattr(actor, "two_sided", False) or (own is not None and own.two_sided)
    calls: dict[tuple[str, int | str], list[Part]] = {}  # one hook for all skips in one argument
    joins: dict[str, list[tuple[int, Site]]] = {}  # and one for all joins in one `forward`
    for index, site in enumerate(sites, start=1):
        if site.join is not None or (at_operation and not site.trailing and not site.leading):
            joins.setdefault(site.called, []).append((index, site))
        else:
            calls.setdefault((site.called, site.argument), []).append(Part(index, site))
    handles: list[Handle] = []
    repeated = {site.called: site.calls for site in sites if site.calls is not None}
    if repeated:
        handles.append(net.register_forward_pre_hook(PassHook(actor), prepend=True))
        handles.append(net.register_forward_hook(LeavePass(actor, repeated), always_call=True))
    for (path, argument), parts in calls.items():
        module = net.get_submodule(path)
        hook = ArgumentHook(actor, Argument.of(module, argument), tuple(parts))
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=before))
    for path, pairs in joins.items():
        module = module_at(net, path)
        arguments = tuple(None if site.join else Argument.of(module, site.argument) for _, site in pairs)
        owner = JoinHook(actor, path, tuple(pairs), arguments)
        # The mode that is entered last acts first.
        handles.append(module.register_forward_pre_hook(owner, with_kwargs=True, prepend=not before))
        handles.append(module.register_forward_hook(LeaveJoin(actor, owner), always_call=True))
        for child in frontier(module):
            handles.append(child.register_forward_pre_hook(EnterChild(actor, owner), prepend=True))
            handles.append(child.register_forward_hook(LeaveChild(actor, owner)))
    return handles


def module_at(net: nn.Module, path: str) -> nn.Module:
    return net if path == ROOT else net.get_submodule(path)


def scales_in_forward(net: nn.Module, sites: list[Site]) -> bool:
    """Whether the network itself calls `scale_skip`."""
    return declared_sites(net) is not None or all(site.path == ROOT and site.join is None for site in sites)


def _attach_after_norm(net: nn.Module, site: Site, index: int, actor: Any) -> list[Handle]:
    if site.norm is None:
        problem = f"requires a norm that sees the joined tensor of long skip {index}; none was found at {site.path}"
        raise UnsupportedNetworkError(f'placement="after_norm" {problem}; use placement="join"')
    part = Part(index, replace(site, item=None, trailing=not site.leading))
    norm = net.get_submodule(site.norm)
    handles: list[Handle] = [norm.register_forward_hook(NormHook(actor, part, Argument.of(norm, 0)), with_kwargs=True)]
    if site.shortcut is not None:
        shortcut = net.get_submodule(site.shortcut)
        hook = ArgumentHook(actor, Argument.of(shortcut, 0), (part,))
        handles.append(shortcut.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def detach(net: nn.Module, actor: Any) -> None:
    """Remove every hook of `actor` from the network."""
    for module in net.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, kind)
            for key in [k for k, hook in hooks.items() if isinstance(hook, SkipHook) and hook.actor is actor]:
                for table in (hooks, getattr(module, f"{kind}_with_kwargs"), module._forward_hooks_always_called):
                    table.pop(key, None)
