"""Hooks that take norms while a network runs: attached for one pass, taken off after it.

Nothing is read from the device until `Recorder.norms()`; nothing is kept but norms. Hooks are callable objects.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scalelong._modules import first_tensor
from scalelong.monitor.points import ROOT, Points
from scalelong.monitor.reading import read
from scalelong.scaling import BlockScaling, FixedSkips
from scalelong.skips.application import scaling_of
from scalelong.skips.hooks import _argument_of, split_trailing
from scalelong.skips.sites import Site

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


@dataclass(frozen=True)
class Norms:
    """What one pass showed, on the CPU. The norm of a batch is the root mean square of its samples' norms.

    total      one a point, NaN where nothing passed
    squares    of each point, the squared norm of each sample, where the batch's size was known beforehand
    kappas     i → (mean, least, greatest) of κ_i where it is learned
    n          samples that passed
    nonfinite  the first point, in the order of the pass, that is not finite
    """

    total: list[float]
    squares: list[list[float]] | None
    kappas: dict[int, tuple[float, float, float]]
    n: int
    nonfinite: int | None


class Recorder:
    """Collects norms. With `samples`, one for each sample of a batch of that size; without, one for the batch."""

    def __init__(self, size: int, samples: int | None = None, keep_call: bool = False) -> None:
        self.size, self.samples, self.keep_call = size, samples, keep_call
        self.seen: list[tuple[tuple[int, ...], Tensor]] = []  # in the order of the pass: points, and their norm(s)
        self.kappas: dict[int, list[Tensor]] = {}
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # by id: what a block gives the next takes
        self.batch = 0
        self.rows = 0
        self.autocast: dict[str, torch.dtype | None] = {}
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the first, where it is to become the probe

    def saw(self, keys: tuple[int, ...], x: Tensor | None) -> None:
        if x is None or x.ndim == 0 or not x.is_floating_point():
            return
        held = self.known.get(id(x))
        if held is not None and held[0]() is x and held[1] == x._version:
            self.seen.append((keys, held[2]))
            return
        norm = self._norm(x.detach())
        self.seen.append((keys, norm))
        if not x.is_inference():  # an inference tensor does not count its changes
            self.known[id(x)] = (weakref.ref(x), x._version, norm)

    def _norm(self, x: Tensor) -> Tensor:
        n = self.samples
        wide = None if x.dtype is torch.float32 else torch.promote_types(x.dtype, torch.float32)
        if n is None:
            self.rows = self.rows or x.shape[0]
            return torch.linalg.vector_norm(x, dtype=wide)
        if x.shape[0] % n == 0 and x.numel():
            return torch.linalg.vector_norm(x.reshape(n, -1), dim=1, dtype=wide)
        # the batch's axis is not the first: every sample has its share
        return (torch.linalg.vector_norm(x, dtype=wide) / math.sqrt(n)).expand(n)

    def norms(self) -> Norms | None:
        """One look at the device. None where nothing passed."""
        if not self.seen:
            return None
        distinct = {id(norm): norm for _, norm in self.seen}
        values = read(list(distinct.values())).reshape(len(distinct), -1).tolist()  # a norm a tensor, or one a sample
        place = {key: k for k, key in enumerate(distinct)}
        seen = [(keys, values[place[id(norm)]]) for keys, norm in self.seen]
        found: list[list[float] | None] = [None] * self.size
        for keys, norms in seen:
            for key in keys:
                before = found[key] or [0.0] * len(norms)
                found[key] = [sum_ + norm * norm for sum_, norm in zip(before, norms, strict=True)]
        n = self.samples or self.batch or self.rows
        kappas = {i: _together(read(each)) for i, each in self.kappas.items()}  # (calls, 3)
        bad = (keys[0] for keys, norms in seen if not all(map(math.isfinite, norms)))
        return Norms(
            total=[math.nan if each is None else math.sqrt(sum(each) / n) for each in found],
            squares=[[math.nan] * n if each is None else each for each in found] if self.samples else None,
            kappas=kappas,
            n=n,
            nonfinite=next(bad, None),
        )


class Hooks:
    """The hooks of one network: made once, attached for the passes of a look and taken off after it."""

    _alone: ClassVar[Hooks | None] = None  # whose pass of its own is running, which others do not look at

    def __init__(self, root: nn.Module, points: Points) -> None:
        self.root = root
        self.recorder: Recorder | None = None  # where norms go while the eyes are open
        self.at_root = _RootEye(self)
        self.joins: list[tuple[nn.Module, _SkipEye, nn.Module, _JoinEye]] = []
        outputs: dict[str, list[int]] = {}
        for i, site in enumerate(points.sites, start=1):
            called = root.get_submodule(site.called)
            join = _Join(*_argument_of(called, site.argument), site=site)
            before = _SkipEye(self, join, points.point("skip", i))
            after = _JoinEye(self, join, points.point("joined", i), points.point("backbone", i))
            self.joins.append((called, before, root.get_submodule(site.path), after))
            outputs.setdefault(site.path, []).append(points.point("out", i))
        for k, path in enumerate(points.blocks):
            outputs.setdefault("" if path == ROOT else path, []).append(points.block(k))
        self.outputs = [(root.get_submodule(path), _OutEye(self, tuple(keys))) for path, keys in outputs.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        """For a network that is copied while it is looked at: the hooks of the copy see nothing, ever."""
        closed = memo[id(self)] = object.__new__(Hooks)
        closed.recorder = None
        return closed

    @contextmanager
    def alone(self, recorder: Recorder) -> Iterator[None]:
        """`open`, for a pass that is made to look at: other eyes on the same network are closed meanwhile."""
        Hooks._alone = self
        try:
            with self.open(recorder):
                yield
        finally:
            Hooks._alone = None

    @contextmanager
    def open(self, recorder: Recorder | None) -> Iterator[None]:
        """Norms of every pass of the network go to `recorder`; on leaving, nothing is attached.

        Within it, `open` with another recorder turns them there for a while. None: the eyes are still closed.
        """
        handles: list[RemovableHandle] = []
        outer, self.recorder = self.recorder, recorder
        try:
            if outer is None and recorder is not None:
                self._attach(handles)
            yield
        finally:
            self.recorder = outer
            for handle in handles:
                handle.remove()

    def _attach(self, handles: list[RemovableHandle]) -> None:
        handles.append(self.root.register_forward_pre_hook(self.at_root, with_kwargs=True, prepend=True))
        for called, before, consumer, after in self.joins:
            # the one ahead of the scaling's own hook, the other behind it
            handles.append(called.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(consumer.register_forward_pre_hook(after, with_kwargs=True))
        for module, at_output in self.outputs:
            handles.append(module.register_forward_hook(at_output))
        scaler = scaling_of(self.root)
        if scaler is not None and not isinstance(scaler, FixedSkips) and not isinstance(scaler.spec, BlockScaling):
            handles.append(scaler.register_forward_hook(_KappaEye(self)))


@dataclass(frozen=True)
class _Join:
    """Where in a call the skip is, and where the backbone."""

    name: str | None
    position: int | None
    site: Site

    def skip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The skip in the call that brings it."""
        value = self._argument(args, kwargs)
        item = self.site.item
        if item is not None and isinstance(value, (tuple, list)):
            value = value[item] if -len(value) <= item < len(value) else None
        if not isinstance(value, Tensor):
            return None
        return self._split(value)[1] if self.site.trailing else value

    def joined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """(backbone, skip) in the consumer's call: two arguments, or one that is the concatenation already."""
        if self.site.trailing:
            value = self._argument(args, kwargs)
            return self._split(value) if isinstance(value, Tensor) else (None, None)
        if self.site.carrier is not None:
            whole = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            return (None, None) if whole is None else self._split(whole)
        skip = self.skip(args, kwargs)
        others = [a for k, a in enumerate(args) if k != self.position]
        others += [a for name, a in kwargs.items() if name != self.name]
        return next((a for a in others if isinstance(a, Tensor)), None), skip

    def _argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if self.position is not None and self.position < len(args) else None

    def _split(self, whole: Tensor) -> tuple[Tensor | None, Tensor | None]:
        channels, dim = self.site.channels, self.site.dim
        if channels is None or whole.shape[dim] <= channels:
            return None, None
        return split_trailing(whole, channels, dim)


class _Eye:
    """The base of the hooks."""

    def __init__(self, eyes: Hooks) -> None:
        self.eyes = eyes

    def recorder(self) -> Recorder | None:
        """None while a network is traced, where checkpointing runs a block again, and in the pass of other eyes."""
        if torch.compiler.is_compiling() or _graph_task() != -1 or Hooks._alone not in (None, self.eyes):
            return None
        return self.eyes.recorder


class _RootEye(_Eye):
    """Counts the samples, and notes the mixed precision in force."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder()
        if recorder is None:
            return
        if recorder.keep_call and recorder.call is None:
            recorder.call = (args, kwargs)
        first = first_tensor((*args, *kwargs.values()))
        if first is not None:
            recorder.batch += first.shape[0] if first.ndim else 1
            kind = first.device.type
            recorder.autocast[kind] = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _SkipEye(_Eye):
    def __init__(self, eyes: Hooks, join: _Join, skip: int) -> None:
        super().__init__(eyes)
        self.join, self.skip = join, (skip,)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (recorder := self.recorder()) is not None:
            recorder.saw(self.skip, self.join.skip(args, kwargs))


class _JoinEye(_Eye):
    def __init__(self, eyes: Hooks, join: _Join, joined: int, backbone: int) -> None:
        super().__init__(eyes)
        self.join, self.joined, self.backbone = join, (joined,), (backbone,)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (recorder := self.recorder()) is not None:
            backbone, skip = self.join.joined(args, kwargs)
            recorder.saw(self.backbone, backbone)
            recorder.saw(self.joined, skip)


class _OutEye(_Eye):
    def __init__(self, eyes: Hooks, keys: tuple[int, ...]) -> None:
        super().__init__(eyes)
        self.keys = keys

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (recorder := self.recorder()) is not None:
            recorder.saw(self.keys, first_tensor(output))


class _KappaEye(_Eye):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (recorder := self.recorder()) is not None and isinstance(output, Tensor):
            kappa, i = output.detach().float(), int(args[1])
            figures = torch.stack([kappa.mean(), kappa.min(), kappa.max()])
            recorder.kappas.setdefault(i, []).append(figures)


def _together(calls: Tensor) -> tuple[float, float, float]:
    """(calls, 3) → mean, least and greatest over all calls."""
    return float(calls[:, 0].mean()), float(calls[:, 1].min()), float(calls[:, 2].max())
