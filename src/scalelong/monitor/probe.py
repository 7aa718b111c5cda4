"""The probe: one fixed batch (x_t, t), the same at every look, so that sampled timesteps do not dominate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor
from scalelong.errors import ScaleLongError
from scalelong.monitor.buffer import which_bin

Inputs = Sequence[Any] | Callable[[nn.Module], Any]
LEAST, MOST, SHARE = 4, 8, 8  # samples of a probe that is not given: an eighth of the batch within these
_TIME_NAMES = ("timestep", "timesteps", "t", "time")


def samples_of(batch: int) -> int:
    """How many samples are looked at where nobody says it: few enough that a look is a small part of a step."""
    return min(batch, max(LEAST, min(MOST, batch // SHARE)))


@dataclass(frozen=True)
class Probe:
    """How the network is called, how many samples that is, and their timesteps where they are known."""

    call: Callable[[nn.Module], Any]
    n: int | None
    t: Tensor | None  # (n,)

    def edges(self, bins: int, times: tuple[float, float] | None) -> tuple[float, ...]:
        """The borders of the timestep bins; without `times` from 0 to 1000, or to 1 for times that are in [0, 1]."""
        if times is None:
            times = (0.0, 1.0) if self.t is not None and float(self.t.max()) <= 1 else (0.0, 1000.0)
        low, high = times
        return tuple(low + (high - low) * k / bins for k in range(bins + 1))

    def members(self, edges: Sequence[float]) -> list[list[int]] | None:
        """The samples in each bin."""
        if self.t is None:
            return None
        places = which_bin(self.t, edges).tolist()
        return [[k for k, place in enumerate(places) if place == wanted] for wanted in range(len(edges) - 1)]


def as_probe(inputs: Inputs, t: Any = None) -> Probe:
    """`(x_t, t)`, `(x_t, t, {"class_labels": y})` for keywords, or a function of the network that calls it."""
    if callable(inputs):
        times = None if t is None else torch.as_tensor(t).detach().reshape(-1)
        return Probe(inputs, None if times is None else len(times), times)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)) or not inputs:
        raise ScaleLongError(
            "a probe is the arguments of the network's call, (x_t, t) or (x_t, t, {'y': labels}), or a function of "
            f"the network, not {inputs!r}"
        )
    *args, last = inputs
    kwargs: dict[str, Any] = {}
    if isinstance(last, Mapping) and args:
        kwargs = dict(last)
    else:
        args.append(last)
    return _of_call(tuple(args), kwargs, t)


def from_batch(args: tuple[Any, ...], kwargs: dict[str, Any], t: Any = None) -> Probe:
    """The first samples of a call that was seen, copied."""
    first = first_tensor((*args, *kwargs.values()))
    size = first.shape[0] if first is not None and first.ndim else 0
    return _of_call(tuple(_part(a, size) for a in args), {k: _part(v, size) for k, v in kwargs.items()}, t)


def _of_call(args: tuple[Any, ...], kwargs: dict[str, Any], t: Any) -> Probe:
    first = first_tensor((*args, *kwargs.values()))
    if first is None or first.ndim == 0:
        raise ScaleLongError("a probe needs a batch: its first argument is the noisy input x_t, a tensor")
    n = first.shape[0]
    times = t if t is not None else next((kwargs[name] for name in _TIME_NAMES if name in kwargs), None)
    if times is None and len(args) > 1:
        times = args[1]
    return Probe(_Call(args, kwargs), n, _times(times, n))


def _times(value: Any, n: int) -> Tensor | None:
    if isinstance(value, bool) or not isinstance(value, (Tensor, int, float)):
        return None
    times = torch.as_tensor(value).detach().float().cpu()
    if times.ndim == 0:
        return times.expand(n)
    return times if times.shape == (n,) else None


def _part(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return value[: samples_of(size)].clone() if value.ndim and value.shape[0] == size else value.clone()
    if isinstance(value, Mapping):
        return {key: _part(item, size) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_part(item, size) for item in value)
    return value


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, net: nn.Module) -> Any:
        parameter = next(net.parameters(), None)
        if parameter is None:
            return net(*self.args, **self.kwargs)
        args, kwargs = _moved((self.args, self.kwargs), parameter.device)
        return net(*args, **kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return [_moved(item, device) for item in value] if isinstance(value, list) else value
