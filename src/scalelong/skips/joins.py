"""Joins that no module call shows: additions and concatenations inside a `forward`, and modules that are called often.

While a module with such a join runs, a torch function mode sees the operations of its own `forward`. The k-th join of
the recorded widths is the long skip's; a pass that runs another number of them raises an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scalelong.errors import UnsupportedNetworkError
from scalelong.skips.sites import Join, Site

CATS = (torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.column_stack, torch.stack)
ADDS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__,
        torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__,
        torch.lerp, Tensor.lerp, Tensor.lerp_)  # fmt: skip
IN_PLACE = (Tensor.add_, Tensor.sub_, Tensor.lerp_)  # the result is the first operand, not another tensor
NAMED = ("input", "other", "end")  # the operands of a sum, where they are named
JOINS: dict[Any, str] = {**dict.fromkeys(CATS, "cat"), **dict.fromkeys(ADDS, "add")}


def operands_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return what a join joins; fewer than two tensors if it is not one."""
    if JOINS[func] == "cat":
        joined = args[0] if args else kwargs.get("tensors", ())
        return [] if isinstance(joined, Tensor) else list(joined)
    return [*args[:2], *(kwargs[name] for name in NAMED if name in kwargs)]


def joinable(x: Any) -> bool:
    """Whether `x` may be one side of a join: a tensor, but no parameter such as a position table."""
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter)


def axis_of(func: Any, args: Any, kwargs: dict[str, Any], first: Tensor) -> int | None:
    """Return the axis of a concatenation, None for a stack or an addition."""
    if func in (torch.hstack, torch.column_stack):
        return 1 if first.ndim > 1 else None
    if JOINS[func] == "add" or func is torch.stack:
        return None
    axis: int = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    return axis


def rejoined(func: Any, args: Any, kwargs: dict[str, Any], operands: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the call of a join with other operands."""
    if JOINS[func] == "cat":
        return ((operands, *args[1:]), kwargs) if args else (args, {**kwargs, "tensors": operands})
    positional = min(2, len(args))
    named = zip((name for name in NAMED if name in kwargs), operands[positional:], strict=True)
    return (*operands[:positional], *args[2:]), {**kwargs, **dict(named)}


def matches(join: Join, dim: int, op: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether an operation is a join of these widths. A sum that broadcasts (an embedding, a bias) is none."""
    if op != join.op or len(shapes) != len(join.widths):
        return False
    for shape, width in zip(shapes, join.widths, strict=True):
        if not -len(shape) <= dim < len(shape) or shape[dim] != width:
            return False
    return op == "cat" or shapes[0] == shapes[1]


def frontier(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that `forward` calls: children, or those of containers that have no `forward`."""
    found = []
    for child in module.children():
        container = getattr(type(child), "forward", None) is nn.Module.forward  # a scripted class has none
        found += frontier(child) if container else [child]
    return found


class _Active(threading.local):
    """What runs in this thread: the passes of scaled networks and the calls of modules with joins, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_ACTIVE = _Active()


def _running(owner: object) -> Any:
    for entry in reversed(_ACTIVE.stack):
        if entry.owner is owner:
            return entry
    return None


def act(actor: Any, skip: Tensor, backbone: Tensor | None, i: int) -> tuple[Tensor, Tensor | None]:
    """Let an actor act on the two tensors of a join, as far as it needs both."""
    if getattr(actor, "two_sided", False):
        if backbone is None:
            problem = f"{actor.spec} needs the backbone of the join too, but long skip {i} came alone"
            raise UnsupportedNetworkError(f"{problem}; call skip, x = scale_skip(self, skip, i, x)")
        return actor.join(skip, backbone, i)
    if backbone is not None and getattr(actor, "observes", False):
        actor.observe(backbone, i)
    return actor.scale(skip, i), backbone


@dataclass(eq=False)
class SkipHook:
    """Base class of the hooks, by which `detach` recognizes them."""

    actor: Any


# ------------------------------------------------------------------------------ joins inside a `forward`


@dataclass(eq=False)
class JoinHook(SkipHook):
    """A forward pre-hook on the module whose `forward` joins. `leave`, `enter_child`, `leave_child` belong to it."""

    path: str
    parts: tuple[tuple[int, Site], ...]  # (i, site)
    arguments: tuple[Any, ...]  # where each skip is in a call, None if only the operation shows it

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts = this_call(self.actor, self.path, self.parts)
        passed = {
            i: None if a is None else a.get(args, kwargs) for (i, _), a in zip(self.parts, self.arguments, strict=True)
        }
        mode = _JoinMode(self, parts, [_item(passed[i], site.item) for i, site in parts])
        _ACTIVE.stack.append(mode)
        mode.__enter__()


@dataclass(eq=False)
class LeaveJoin(SkipHook):
    """A forward hook, called always: ends the mode that `JoinHook` began and checks what it has seen."""

    owner: JoinHook

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode = _running(self.owner)
        if mode is None:  # a pre-hook before ours has raised
            return
        _ACTIVE.stack.remove(mode)
        mode.__exit__(None, None, None)
        if output is not None:  # else `forward` has raised an error, or checkpointing stopped recomputing early
            mode.check(type(module).__name__)


@dataclass(eq=False)
class EnterChild(SkipHook):
    """A forward pre-hook on the submodules: what they compute is not theirs."""

    owner: JoinHook

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        mode = _running(self.owner)
        if mode is not None:
            mode.depth += 1


@dataclass(eq=False)
class LeaveChild(SkipHook):
    """A forward hook on the submodules."""

    owner: JoinHook

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mode = _running(self.owner)
        if mode is not None:
            mode.depth -= 1


class _JoinMode(TorchFunctionMode):
    def __init__(self, owner: JoinHook, parts: tuple[tuple[int, Site], ...], skips: list[Any]) -> None:
        super().__init__()
        self.owner, self.parts, self.depth = owner, parts, 0
        self.skips = skips  # the tensors that were passed, None if only the operation shows the skip
        self.counts = [0] * len(parts)
        self.top = None if torch.compiler.is_compiling() else _checkpoint()
        self.gradients = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth == 0 and func in JOINS:
            args, kwargs = self._scaled(func, args, kwargs)
        return func(*args, **kwargs)

    def _scaled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not torch.compiler.is_compiling() and sys._getframe(2).f_code.co_filename.startswith("<eval_with_key>"):
            return args, kwargs  # the compiled graph of this `forward`: it was traced with κ_i in it
        operands, changed = operands_of(func, args, kwargs), False
        if not all(map(joinable, operands)):
            return args, kwargs
        shapes = [x.shape for x in operands]
        for k, (index, site) in enumerate(self.parts):
            position = self._position(k, site, operands, JOINS[func], shapes)
            if position is None:
                continue
            self.counts[k] += 1
            if self.counts[k] == (1 if site.join is None else site.join.nth + 1):
                if not torch.compiler.is_compiling() and self._in_checkpoint():
                    raise UnsupportedNetworkError(
                        f"long skip {index} joins inside a checkpointed function of {self.owner.path}, which would be "
                        "recomputed without κ; checkpoint a module instead of a function, or call scale_skip in it"
                    )
                before, modes = list(operands), [mode for mode in _ACTIVE.stack if isinstance(mode, _JoinMode)]
                for mode in modes:  # what the actor computes is not the network's
                    mode.depth += 1
                self._act(func, operands, position, index)
                for mode in modes:
                    mode.depth -= 1
                changed = changed or any(new is not old for new, old in zip(operands, before, strict=True))
        return rejoined(func, args, kwargs, operands) if changed else (args, kwargs)

    def _in_checkpoint(self) -> bool:
        """Whether a function will be recomputed: torch's checkpoint, or one that runs it without gradients first."""
        return _checkpoint() not in (None, self.top) or (self.gradients and not torch.is_grad_enabled())

    def _position(self, k: int, site: Site, operands: list[Any], op: str, shapes: Any) -> int | None:
        """Return which operand is the skip of part k, None if the operation does not join it."""
        if site.join is not None:
            return site.join.operand if matches(site.join, site.dim, op, shapes) else None
        same = [n for n, x in enumerate(operands) if x is self.skips[k]]
        return same[0] if same else None

    def _act(self, func: Any, operands: list[Any], position: int, index: int) -> None:
        actor, skip = self.owner.actor, operands[position]
        backbone = operands[1 - position] if len(operands) == 2 else None
        if getattr(actor, "two_sided", False):
            if backbone is None:
                problem = f"{self.owner.path} joins {len(operands)} tensors at long skip {index}"
                raise UnsupportedNetworkError(f"{problem}, but {actor.spec} needs one skip and one backbone")
            if JOINS[func] not in actor.joins:
                raise wrong_join(actor.spec, index, self.owner.path, JOINS[func])
            if func in IN_PLACE:
                raise UnsupportedNetworkError(f"{self.owner.path} joins long skip {index} in place; write h = h + skip")
        operands[position], backbone = act(actor, skip, backbone, index)
        if backbone is not None:
            operands[1 - position] = backbone
        for other in _ACTIVE.stack:  # another actor may look for the tensor that was passed
            if isinstance(other, _JoinMode):
                other.skips = [operands[position] if s is skip else s for s in other.skips]

    def check(self, name: str) -> None:
        for (index, site), count in zip(self.parts, self.counts, strict=True):
            join = site.join
            if join is None and count != 1:
                raise UnsupportedNetworkError(
                    f"{name} was called with long skip {index} but changes it before it joins it, so a method that "
                    f"acts on both tensors of the join ({type(self.owner.actor).__name__}) does not reach it"
                )
            if join is not None and count != join.of:
                raise UnsupportedNetworkError(
                    f"{name} ran {count} joins ({join.op}) of widths {join.widths} where the example ran {join.of}, so "
                    f"long skip {index} cannot be identified; apply the scaling with an example of this kind"
                )


def _item(value: Any, item: int | str | None) -> Any:
    """Return the skip within an argument, None if it is not there."""
    try:
        return value if item is None or value is None else value[item]
    except (IndexError, KeyError):
        return None


def wrong_join(spec: Any, index: int, path: str, op: str) -> UnsupportedNetworkError:
    """Return the error for a method that makes no sense for a join."""
    done, needed = ("added", "concatenated") if op == "add" else ("concatenated", "added")
    return UnsupportedNetworkError(f"{spec} needs skips that are {needed}, but long skip {index} ({path}) is {done}")


def _checkpoint() -> Any:
    """Return what identifies the checkpointed function that runs, None outside of one."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(True)
    return top[0] if top is not None and "checkpoint" in getattr(top[0], "__module__", "") else None


# --------------------------------------------------------------- modules that run several times in one pass


@dataclass(eq=False)
class _Pass:
    """One pass of the network: how often each module was called so far."""

    owner: Any
    counts: dict[str, int]


@dataclass(eq=False)
class PassHook(SkipHook):
    """A forward pre-hook on the network: starts to count the calls."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _ACTIVE.stack.append(_Pass(self.actor, {}))


@dataclass(eq=False)
class LeavePass(SkipHook):
    """A forward hook on the network, called always: checks the number of calls."""

    calls: dict[str, int]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        run = _running(self.actor)
        if run is None:
            return
        _ACTIVE.stack.remove(run)
        for path, expected in self.calls.items():
            if output is not None and run.counts.get(path, 0) != expected:
                raise UnsupportedNetworkError(
                    f"{path} was called {run.counts.get(path, 0)} times in one pass, but {expected} times with the "
                    "example; apply the scaling with an example of this kind"
                )


def this_call(actor: Any, path: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts that belong to this call of the module, of (i, site) pairs."""
    if parts[0][1].calls is None:
        return parts
    run = _running(actor)
    if run is None:
        raise UnsupportedNetworkError(
            f"{path} is called several times in one pass of the network, so it cannot be called alone or recomputed by "
            "checkpointing: which long skip it joins would be unknown"
        )
    n = run.counts.get(path, 0)
    run.counts[path] = n + 1
    return tuple(part for part in parts if part[1].call == n)
