"""Record the norms of activations through hooks, and the norms of gradients and weights by block.

Hooks are attached for one pass and removed after it. Only norms are kept, and nothing is copied from the device
before `Recorder.norms()`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor
from scalelong.errors import InvalidValueError
from scalelong.monitor.points import ROOT, Points, coefficients_of
from scalelong.scaling.modules import CalibratedSkips
from scalelong.skips.hooks import Argument, Handle, attach, scales_in_forward, scaling_of, split_joined
from scalelong.skips.sites import Site

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def to_cpu(values: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape and copy them to the CPU as float64, with a single synchronization."""
    if len({(value.device, value.dtype) for value in values}) > 1:
        device = values[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        values = [value.to(device, wide) for value in values]
    return torch.stack(list(values)).cpu().double()


@dataclass(frozen=True)
class Norms:
    """The norms of one or more passes. The norm of a batch is the root mean square of its samples' norms."""

    total: list[float]  # one value per point; NaN if the point was not reached
    squares: list[list[float]] | None  # per point, the squared norm of each sample; only for a known batch size
    kappas: dict[int, tuple[float, float, float]]  # i → (mean, min, max) of a learned κ_i
    dead: tuple[int, ...]  # the skips whose calibration network ignores its input
    n: int  # number of samples
    nonfinite: int | None  # the first point, in the order of the pass, whose norm is not finite


class Recorder:
    """Collect norms: one per sample if the batch size `samples` is given, else one per batch."""

    def __init__(self, size: int, samples: int | None = None, keep_call: bool = False) -> None:
        self.size, self.samples, self.keep_call = size, samples, keep_call
        self.recorded: list[tuple[tuple[int, ...], Tensor]] = []  # (points, norms) in the order of the pass
        self.kappas: dict[int, list[Tensor]] = {}
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # tensors that several points share
        self.batch = self.rows = 0
        self.autocast: dict[str, torch.dtype | None] = {}
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the first call, if it becomes the probe

    def record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the samples, and remember the mixed precision of the call."""
        if self.keep_call and self.call is None:
            self.call = (args, kwargs)
        first = first_tensor((*args, *kwargs.values()))
        if first is not None:
            self.batch += first.shape[0] if first.ndim else 1
            kind = first.device.type
            self.autocast[kind] = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def record_skip(self, join: _Join, point: int, *call: Any) -> None:
        self.record((point,), join.skip(*call))

    def record_join(self, join: _Join, points: tuple[int, int], *call: Any) -> None:
        for point, x in zip(points, join.operands(*call), strict=True):
            self.record((point,), x)

    def record_output(self, points: tuple[int, ...], args: Any, output: Any) -> None:
        self.record(points, first_tensor(output))

    def record_kappa(self, scaler: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            kappa, (skip, i) = output.detach().float(), args
            dead = scaler.is_dead(skip, i).float() if isinstance(scaler, CalibratedSkips) else kappa.new_zeros(())
            self.kappas.setdefault(int(i), []).append(torch.stack([kappa.mean(), kappa.min(), kappa.max(), dead]))

    def record(self, points: tuple[int, ...], x: Tensor | None) -> None:
        """Record the norm of `x` at these points."""
        if x is None or x.ndim == 0 or not x.is_floating_point():
            return
        known = self.known.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            norm = known[2]
        else:
            norm = self._norm(x.detach())
            if not x.is_inference():  # inference tensors have no version counter
                self.known[id(x)] = (weakref.ref(x), x._version, norm)
        self.recorded.append((points, norm))

    def _norm(self, x: Tensor) -> Tensor:
        n = self.samples
        wide = None if x.dtype is torch.float32 else torch.promote_types(x.dtype, torch.float32)
        if n is None:
            self.rows = self.rows or x.shape[0]
            return torch.linalg.vector_norm(x, dtype=wide)
        if x.shape[0] % n == 0 and x.numel():
            return torch.linalg.vector_norm(x.reshape(n, -1), dim=1, dtype=wide)
        # The first axis is not the batch: give every sample an equal share.
        return (torch.linalg.vector_norm(x, dtype=wide) / math.sqrt(n)).expand(n)

    def norms(self) -> Norms | None:
        """Copy the norms to the CPU, with one synchronization. Returns None if nothing was recorded."""
        if not self.recorded:
            return None
        distinct = {id(norm): norm for _, norm in self.recorded}
        values = to_cpu(list(distinct.values())).reshape(len(distinct), -1).tolist()
        by_id = dict(zip(distinct, values, strict=True))
        recorded = [(points, by_id[id(norm)]) for points, norm in self.recorded]
        squares: list[list[float] | None] = [None] * self.size
        for points, norms in recorded:
            for point in points:
                sums = squares[point] or [0.0] * len(norms)
                squares[point] = [sum_ + norm * norm for sum_, norm in zip(sums, norms, strict=True)]
        kappas, dead = {}, []
        for i, calls in self.kappas.items():
            mean, low, high, ignored = to_cpu(calls).unbind(1)
            kappas[i] = (float(mean.mean()), float(low.min()), float(high.max()))
            dead += [i] if bool(ignored.all()) else []
        n = self.samples or self.batch or self.rows
        return Norms(
            total=[math.nan if each is None else math.sqrt(sum(each) / n) for each in squares],
            squares=[[math.nan] * n if each is None else each for each in squares] if self.samples else None,
            kappas=kappas,
            dead=tuple(sorted(dead)),
            n=n,
            nonfinite=next((points[0] for points, norms in recorded if not all(map(math.isfinite, norms))), None),
        )


class Hooks:
    """The hooks of one network: built once, attached for the passes of a snapshot and removed after them."""

    _exclusive: ClassVar[Hooks | None] = None  # runs a pass of its own, which other monitors must ignore
    training_only = False  # whether passes in eval mode or without gradients are ignored: `Steps` asks for it
    ignored = False  # whether the pass that runs is one of them

    def __init__(self, root: nn.Module, points: Points) -> None:
        self.root, self.n = root, points.n
        self.recorder: Recorder | None = None
        self.before: list[tuple[nn.Module, _Hook, bool]] = [(root, _Hook(self, Recorder.record_call), True)]
        self.taps: list[tuple[_Tap, bool]] = []  # for a network that scales its skips in `forward`
        self.sites = list(points.sites)
        scaler = scaling_of(root)
        inside = any(site.join is not None or site.calls is not None for site in points.sites)  # no argument shows it
        inside = inside or (scaler is not None and scaler.two_sided)
        in_forward = inside or (points.sites != () and scales_in_forward(root, list(points.sites)))
        joins = [k for k, site in enumerate(points.sites) if inside or site.path == ROOT]  # no call shows the backbone
        if in_forward:
            backbones = {k + 1: points.start("backbone") + k for k in joins}
            self.taps.append((_Tap(self, points.start("skip"), backbones), True))
        if joins:
            self.taps.append((_Tap(self, points.start("joined"), {}), False))
        outputs: dict[str, list[int]] = {}
        for k, site in enumerate(points.sites):
            skip, backbone, out, joined = (points.start(m) + k for m in ("skip", "backbone", "out", "joined"))
            outputs.setdefault("" if site.path == ROOT else site.path, []).append(out)
            if k in joins:
                continue
            called = root.get_submodule(site.called)
            join = _Join(Argument.of(called, site.argument), site)
            if not in_forward:  # runs before the hook that applies κ_i; the next runs after it
                self.before.append((called, _Hook(self, Recorder.record_skip, join, skip), True))
            consumer = root.get_submodule(site.path)
            self.before.append((consumer, _Hook(self, Recorder.record_join, join, (backbone, joined)), False))
        for k, path in enumerate(points.blocks, start=points.start("blocks")):
            outputs.setdefault("" if path == ROOT else path, []).append(k)
        hooks = {path: _Hook(self, Recorder.record_output, tuple(ks)) for path, ks in outputs.items()}
        self.after = [(root.get_submodule(path), hook) for path, hook in hooks.items()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        """Return hooks that record nothing, for a network that is copied during a snapshot."""
        detached = memo[id(self)] = object.__new__(Hooks)
        detached.recorder = None
        return detached

    @contextmanager
    def attached(self, recorder: Recorder, exclusive: bool = False) -> Iterator[None]:
        """Record every pass in `recorder`, and remove all hooks on exit. A nested call redirects the hooks.

        `exclusive` hides the pass from other monitors of the same network.
        """
        handles = list[Handle]()
        outer, self.recorder = self.recorder, recorder
        Hooks._exclusive = self if exclusive else Hooks._exclusive
        try:
            if outer is None:
                for tap, first in self.taps:
                    handles += attach(self.root, self.sites, tap, before=first)
                for module, hook, first in self.before:
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))
                handles += [module.register_forward_hook(hook) for module, hook in self.after]
                if self.training_only:  # the last to be put first: it decides before anything is recorded
                    handles.append(self.root.register_forward_pre_hook(_TrainingOnly(self), prepend=True))
                scaler = scaling_of(self.root)
                if scaler is not None and scaler.is_factor and coefficients_of(self.root, self.n) is None:
                    handles.append(scaler.register_forward_hook(_Hook(self, Recorder.record_kappa, scaler)))
            yield
        finally:
            self.recorder = outer
            if exclusive:
                Hooks._exclusive = None
            self.ignored = self.ignored and outer is not None
            for handle in handles:
                handle.remove()

    def current(self) -> Recorder | None:
        """Return the recorder, or None while a network is traced, recomputed by checkpointing or run by others."""
        if torch.compiler.is_compiling() or _graph_task() != -1 or Hooks._exclusive not in (None, self):
            return None
        return None if self.ignored and Hooks._exclusive is None else self.recorder


class _Hook:
    """A forward hook or pre-hook. Callable objects, unlike closures, survive `copy.deepcopy` of the network."""

    def __init__(self, hooks: Hooks, record: Callable[..., None], *context: Any) -> None:
        self.hooks, self.record, self.context = hooks, record, context

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs_or_output: Any) -> None:
        recorder = self.hooks.current()
        if recorder is not None:
            self.record(recorder, *self.context, args, kwargs_or_output)


class _TrainingOnly:
    """A forward pre-hook of the network. Its parts cannot tell: checkpointed blocks run without gradients."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.hooks.ignored = not (module.training and torch.is_grad_enabled())


class _Tap:
    """Records skips where the network calls `scale_skip` or joins them, before or after κ_i, and backbones by i."""

    observes = True

    def __init__(self, hooks: Hooks, start: int, backbones: dict[int, int]) -> None:
        self.hooks, self.start, self.backbones = hooks, start, backbones

    def observe(self, backbone: Tensor, i: int) -> None:
        recorder = self.hooks.current()
        if recorder is not None and i in self.backbones:
            recorder.record((self.backbones[i],), backbone)

    def scale(self, skip: Tensor, i: int) -> Tensor:
        recorder = self.hooks.current()
        if recorder is not None:
            recorder.record((self.start + i - 1,), skip)
        return skip


@dataclass(frozen=True)
class _Join:
    """Extracts the skip and the backbone from the arguments of a call."""

    argument: Argument
    site: Site

    def skip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the skip from the call that brings it."""
        value, item = self.argument.get(args, kwargs), self.site.item
        if isinstance(value, dict):
            value = value.get(item)
        elif isinstance(item, int) and isinstance(value, (tuple, list)):
            value = value[item] if -len(value) <= item < len(value) else None
        if self.site.trailing or self.site.leading:
            return self._split(value)[1]
        return value if isinstance(value, Tensor) else None

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Return (backbone, skip) from the consumer's call: two arguments, or one concatenated tensor."""
        if self.site.trailing or self.site.leading:
            return self._split(self.argument.get(args, kwargs))
        if self.site.carrier is not None:
            return self._split(next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None))
        others = [a for k, a in enumerate(args) if k != self.argument.position]
        others += [a for name, a in kwargs.items() if name != self.argument.name]
        return next((a for a in others if isinstance(a, Tensor)), None), self.skip(args, kwargs)

    def _split(self, whole: Any) -> tuple[Tensor | None, Tensor | None]:
        channels, dim = self.site.channels, self.site.dim
        if not isinstance(whole, Tensor) or channels is None or whole.shape[dim] <= channels:
            return None, None
        return split_joined(whole, channels, dim, self.site.leading)


@dataclass(frozen=True)
class BlockNorms:
    """The norm over all parameters and over those of each block (NaN for a block without parameters)."""

    total: float
    blocks: list[float]
    nonfinite: int | None = None  # a block whose norm is not finite: the last one, which backward reaches first


class ParameterNorms:
    """Norms over a network's parameters by block. Build it when the network is complete."""

    def __init__(self, root: nn.Module, points: Points) -> None:
        named = dict(root.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.count = len(points.blocks)
        self._sharded = any(hasattr(parameter, "to_local") for parameter in self.parameters)
        self.block_of = [  # the root's own parameters come last
            next((k for k, path in enumerate(points.blocks) if name.startswith(f"{path}.")), self.count - 1)
            for name in self.names
        ]

    def gradients(self, scale: float = 1.0) -> BlockNorms | None:
        """Return the current gradient norms divided by a loss scale, or None before the first backward pass."""
        held = [(k, p.grad) for k, p in zip(self.block_of, self.parameters, strict=True) if p.grad is not None]
        if not held:
            return None
        dense = [grad.coalesce().values() if grad.is_sparse else grad for _, grad in held]
        norms = _norms([_local(grad) for grad in dense], self._sharded)
        return self._by_block([k for k, _ in held], [norm / scale for norm in norms])

    @torch.no_grad()
    def drift(self, ema: list[Tensor]) -> BlockNorms:
        """Return ‖θ − θ̄‖/‖θ̄‖, the relative distance to the averaged parameters θ̄."""
        pairs = zip(self.parameters, ema, strict=True)
        distances = [_local(p) - _local(average).to(_local(p)) for p, average in pairs]
        norms = _norms([*distances, *map(_local, ema)], self._sharded)
        apart, size = (self._by_block(self.block_of, part) for part in (norms[: len(ema)], norms[len(ema) :]))
        shares = [d / s if s else math.nan for d, s in zip(apart.blocks, size.blocks, strict=True)]
        return BlockNorms(apart.total / (size.total or math.nan), shares)

    def average_of(self, ema: Any) -> list[Tensor]:
        """Return averaged parameters in the network's order: by name from a network, by position from a list."""
        if isinstance(ema, nn.Module):
            named = dict(ema.named_parameters())
            prefix = "" if set(self.names) <= named.keys() else "module."  # of torch's AveragedModel
            tensors = [named[prefix + name].detach() for name in self.names if prefix + name in named]
        else:
            candidates = getattr(ema, "shadow_params", ema)  # diffusers' EMAModel
            tensors = [t for t in candidates if isinstance(t, Tensor)] if isinstance(candidates, Iterable) else []
        if [t.shape for t in tensors] != [p.shape for p in self.parameters]:
            raise InvalidValueError(
                f"ema must be the averaged network or its parameters in order, got {type(ema).__name__} with "
                f"{len(tensors)} tensors that match; the network has {len(self.parameters)} parameters"
            )
        return tensors

    def _by_block(self, blocks: list[int], norms: list[float]) -> BlockNorms:
        """Combine one norm per parameter into one per block."""
        squares = dict.fromkeys(sorted(blocks), 0.0)
        for k, norm in zip(blocks, norms, strict=True):
            squares[k] += norm * norm
        bad = [k for k, square in squares.items() if not math.isfinite(square)]
        each = [math.sqrt(squares.get(k, math.nan)) for k in range(self.count)]
        return BlockNorms(math.sqrt(sum(squares.values())), each, bad[-1] if bad else None)


def _local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a network that `fully_shard` shards; a whole tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _norms(tensors: Sequence[Tensor], sharded: bool = False) -> list[float]:
    """Return one norm per tensor, with few kernels (foreach falls back to one each) and one synchronization.

    Norms of shards are combined by one reduction over all processes.
    """
    half = [tensor for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]
    if not half:
        norms = torch._foreach_norm(list(tensors))
    elif len(half) == len(tensors):  # whose norm may overflow where no value does
        norms = torch._foreach_norm(half, 2, torch.float32)
    else:
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
        norms = tuple(torch.linalg.vector_norm(t, dtype=dtype) for t, dtype in zip(tensors, wide, strict=True))
    if not sharded:
        return to_cpu(norms).tolist()
    squares = torch.stack(list(norms)).float().square()
    torch.distributed.all_reduce(squares)
    return squares.sqrt().cpu().double().tolist()
