"""The probe: one fixed batch (x_t, t), so that sampled timesteps do not dominate what the monitor compares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from scalelong._modules import device_of, first_tensor
from scalelong.errors import InvalidValueError, invalid
from scalelong.monitor.snapshot import which_bin

Inputs = Sequence[Any] | Callable[[nn.Module], Any]


def probe_size(batch: int) -> int:
    """Return the default number of probe samples: an eighth of the batch, at least 4 and at most 8."""
    return min(batch, max(4, min(8, batch // 8)))


@dataclass(frozen=True)
class Probe:
    """How to call the network, the number of samples, and their timesteps, (n,), if known."""

    call: Callable[[nn.Module], Any]
    n: int | None
    t: Tensor | None

    def edges(self, bins: int, times: tuple[float, float] | None) -> tuple[float, ...]:
        """Return the edges of the timestep bins. The default range is [0, 1000], or [0, 1] if all t are within it."""
        if times is None:
            times = (0.0, 1.0) if self.t is not None and float(self.t.max()) <= 1 else (0.0, 1000.0)
        low, high = times
        return tuple(low + (high - low) * k / bins for k in range(bins + 1))

    def members(self, edges: Sequence[float]) -> list[list[int]] | None:
        """Return the indices of the samples in each bin."""
        if self.t is None:
            return None
        bins = which_bin(self.t, edges).tolist()
        return [[k for k, bin_ in enumerate(bins) if bin_ == wanted] for wanted in range(len(edges) - 1)]


def as_probe(inputs: Inputs, t: Any = None) -> Probe:
    """Make a probe of `(x_t, t)`, `(x_t, t, {"class_labels": y})` or a function that calls the network."""
    if callable(inputs):
        times = None if t is None else torch.as_tensor(t).detach().reshape(-1)
        return Probe(inputs, None if times is None else len(times), times)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)) or not inputs:
        expected = "the network's arguments, (x_t, t) or (x_t, t, {'y': labels}), or a function of the network"
        raise invalid("probe", expected, inputs)
    *args, last = inputs
    named = isinstance(last, Mapping) and bool(args)
    return _from_call(tuple(args), dict(last), t) if named else _from_call(tuple(inputs), {}, t)


def from_batch(args: tuple[Any, ...], kwargs: dict[str, Any], t: Any = None) -> Probe:
    """Make a probe of the first samples of a recorded call. Tensors are copied."""
    first = first_tensor((*args, *kwargs.values()))
    size = first.shape[0] if first is not None and first.ndim else 0

    def part(x: Tensor) -> Tensor:
        return (x[: probe_size(size)] if x.ndim and x.shape[0] == size else x).detach().clone()

    args, kwargs = tree_map_only(Tensor, part, (args, kwargs))
    return _from_call(args, kwargs, t)


def _from_call(args: tuple[Any, ...], kwargs: dict[str, Any], t: Any) -> Probe:
    first = first_tensor((*args, *kwargs.values()))
    if first is None or first.ndim == 0:
        raise InvalidValueError("probe must contain a batch; its first argument is the noisy input x_t, a tensor")
    n = first.shape[0]
    candidates = [t, *(kwargs.get(name) for name in ("timestep", "timesteps", "t", "time")), *args[1:2]]
    value, times = next((value for value in candidates if value is not None), None), None
    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
        times = torch.as_tensor(value).detach().float().cpu()
        times = times.expand(n) if times.ndim == 0 else times if times.shape == (n,) else None

    def call(net: nn.Module) -> Any:
        device = device_of(net)
        moved, named = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        return net(*moved, **named)

    return Probe(call, n, times)
