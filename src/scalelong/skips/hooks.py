"""The hooks that scale. Callable objects, never closures: they copy, pickle and compile with the network."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.scaling import SkipScaling, scale
from scalelong.skips.sites import Site


@dataclass(frozen=True)
class Part:
    """Which part of a value is long skip `index`."""

    index: int
    item: int | None
    trailing: int | None  # the number of trailing channels, None for the whole tensor
    dim: int


class SkipHook:
    """The base of the hooks, by which `remove` knows them. `scaler` is the one module on the network's root."""

    def __init__(self, scaler: SkipScaling) -> None:
        self.scaler = scaler


class ArgumentHook(SkipHook):
    """A forward pre-hook that scales the long skips which one argument of a call brings."""

    def __init__(self, scaler: SkipScaling, name: str | None, position: int | None, parts: tuple[Part, ...]) -> None:
        super().__init__(scaler)
        self.name, self.position, self.parts = name, position, parts

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name is not None and self.name in kwargs:
            return args, {**kwargs, self.name: self._scaled(kwargs[self.name])}
        if self.position is not None and self.position < len(args):
            scaled = self._scaled(args[self.position])
            return (*args[: self.position], scaled, *args[self.position + 1 :]), kwargs
        raise ScaleLongError(
            f"{type(module).__name__} was called without argument {self.name or self.position!r}, "
            f"which brings long skip {self.parts[0].index}"
        )

    def _scaled(self, value: Any) -> Any:
        if self.parts[0].item is None:
            return self._scaled_part(value, self.parts[0])
        if not isinstance(value, (tuple, list)):
            raise ScaleLongError(
                f"argument {self.name or self.position!r}, which brings long skip {self.parts[0].index} in a tuple or "
                f"list, is a {type(value).__name__}"
            )
        items = list(value)
        for part in self.parts:
            assert part.item is not None
            if not -len(items) <= part.item < len(items):
                raise ScaleLongError(
                    f"argument {self.name or self.position!r} has {len(items)} items, but long skip {part.index} is "
                    f"its item {part.item}"
                )
            items[part.item] = self._scaled_part(items[part.item], part)
        return tuple(items) if isinstance(value, tuple) else items

    def _scaled_part(self, x: Tensor, part: Part) -> Tensor:
        if not isinstance(x, Tensor):
            raise ScaleLongError(f"long skip {part.index} is a tensor, but a {type(x).__name__} arrived")
        if part.trailing is None:
            return scale(x, self.scaler(x, part.index))
        backbone, skip = split_trailing(x, part.trailing, part.dim)
        kappa = self.scaler(skip, part.index)
        return x if _is_one(kappa) else torch.cat([backbone, skip * kappa], dim=part.dim)


class NormHook(SkipHook):
    """A forward hook that scales the skip's channels at a norm's output; κ_i comes from the skip as it went in."""

    def __init__(self, scaler: SkipScaling, part: Part) -> None:
        super().__init__(scaler)
        self.part = part

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert self.part.trailing is not None
        _, skip = split_trailing(args[0], self.part.trailing, self.part.dim)
        kappa = self.scaler(skip, self.part.index)
        if _is_one(kappa):
            return output
        backbone, normed = split_trailing(output, self.part.trailing, self.part.dim)
        return torch.cat([backbone, normed * kappa], dim=self.part.dim)


class BranchHook(SkipHook):
    """A forward hook that scales the output of a residual branch (Table 3's baselines)."""

    def __init__(self, scaler: SkipScaling, index: int) -> None:
        super().__init__(scaler)
        self.index = index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return scale(output, self.scaler(output, self.index))


def split_trailing(x: Tensor, channels: int, dim: int) -> tuple[Tensor, Tensor]:
    """The backbone's and the skip's channels of a concatenation."""
    if x.shape[dim] <= channels:
        raise ScaleLongError(f"a concatenation of {x.shape[dim]} channels cannot end with a skip of {channels}")
    backbone, skip = x.split([x.shape[dim] - channels, channels], dim=dim)
    return backbone, skip


def attach(net: nn.Module, sites: list[Site], scaler: SkipScaling, placement: str) -> None:
    """Register the hooks by which `scaler` acts on `sites` (outermost first)."""
    if placement == "after_norm":
        for index, site in enumerate(sites, start=1):
            _attach_after_norm(net, site, index, scaler)
        return
    calls: dict[tuple[str, int | str], list[tuple[int, Site]]] = {}
    for index, site in enumerate(sites, start=1):
        calls.setdefault((site.called, site.argument), []).append((index, site))
    for (path, argument), brought in calls.items():
        module = net.get_submodule(path)
        parts = tuple(
            Part(index, site.item, site.channels if site.trailing else None, site.dim) for index, site in brought
        )
        name, position = _argument_of(module, argument)
        module.register_forward_pre_hook(ArgumentHook(scaler, name, position, parts), with_kwargs=True)


def attach_branches(net: nn.Module, branches: list[list[str]], scaler: SkipScaling) -> None:
    """Register the hooks that scale block outputs: `branches[b]` are the paths of block b's branches."""
    for index, paths in enumerate(branches, start=1):
        for path in paths:
            net.get_submodule(path).register_forward_hook(BranchHook(scaler, index))


def detach(net: nn.Module, scaler: SkipScaling) -> None:
    """Take off every hook of `scaler`, wherever in the network it is."""
    for module in net.modules():
        for hooks, companions in (
            (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
            (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
        ):
            for key in [k for k, hook in hooks.items() if isinstance(hook, SkipHook) and hook.scaler is scaler]:
                del hooks[key]
                for companion in companions:
                    companion.pop(key, None)


def _attach_after_norm(net: nn.Module, site: Site, index: int, scaler: SkipScaling) -> None:
    if site.norm is None:
        raise ScaleLongError(
            f'placement="after_norm": {site.path} has no normalisation right after the join of long skip {index}, '
            "so κ is felt as it is"
        )
    part = Part(index, None, site.channels, site.dim)
    net.get_submodule(site.norm).register_forward_hook(NormHook(scaler, part))
    if site.shortcut is not None:
        shortcut = net.get_submodule(site.shortcut)
        shortcut.register_forward_pre_hook(ArgumentHook(scaler, None, 0, (part,)), with_kwargs=True)


def _argument_of(module: nn.Module, argument: int | str) -> tuple[str | None, int | None]:
    """The name and the position of an argument of `module.forward`, so that both ways of calling are met."""
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if isinstance(argument, int):
        if argument < len(named):
            return named[argument], argument
        if takes_any:
            return None, argument
    elif argument in named:
        return argument, named.index(argument)
    elif argument in [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]:
        return argument, None
    raise ScaleLongError(
        f"{type(module).__name__}.forward has no argument {argument!r}; it has {', '.join(named) or 'none'}"
    )


def _is_one(kappa: float | Tensor) -> bool:
    return isinstance(kappa, float) and kappa == 1.0
