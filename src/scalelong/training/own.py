"""Your own loss, optimizer and metrics in `train()`: functions, recorded in config.json and compared on resume."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.diffusion import Interpolant
from scalelong.errors import invalid
from scalelong.training.examples import Batch

LossFn = Callable[[Callable[[Tensor, Tensor], Tensor], Interpolant, Batch], Tensor]
"""`loss(eps_fn, process, batch)` → the loss of each sample, (B,). `eps_fn(x_t, t)` predicts the noise, converted from
what the run's objective makes the network predict, with t in the process's own time and the batch's conditions;
`batch` has x_0, eps (B, C, H, W) and t (B,)."""

OptimizerFn = Callable[[nn.Module], torch.optim.Optimizer]
"""`optimizer(net)` → any torch optimizer. The schedule and the warm-up multiply the learning rate of its groups."""

MetricsFn = Callable[[nn.Module, int], Mapping[str, float]]
"""`metrics(net, step)` → numbers for metrics.jsonl, from the EMA network in eval mode, at every validation."""


@dataclass(frozen=True)
class Own:
    """The functions that a script passes to `train`."""

    loss: LossFn | None = None
    optimizer: OptimizerFn | None = None
    metrics: MetricsFn | None = None

    def record(self) -> dict[str, str]:
        """Name and source hash of each function, for config.json."""
        return {name: _identity(value) for name, value in vars(self).items() if value is not None}


def changes(stored: Any, own: Own) -> list[str]:
    """Return `loss: stored → new` for what changes a loss. Metrics may change: they only observe."""
    before, after = stored if isinstance(stored, dict) else {}, own.record()
    keys = [key for key in ("loss", "optimizer") if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key, 'built in')} → {after.get(key, 'built in')}" for key in keys]


def _identity(function: Any) -> str:
    """`module.name (source 1a2b3c4d)`: the same in every process that runs the same code."""
    if isinstance(function, partial):
        arguments = ", ".join([*map(repr, function.args), *(f"{k}={v!r}" for k, v in function.keywords.items())])
        return f"{_identity(function.func)} with {arguments}"
    target = function if hasattr(function, "__qualname__") else type(function)
    name = target.__qualname__ if target.__module__ == "__main__" else f"{target.__module__}.{target.__qualname__}"
    try:
        source = textwrap.dedent(inspect.getsource(target))
    except (OSError, TypeError):  # built in, or typed into a prompt
        return name
    return f"{name} (source {hashlib.sha256(source.encode()).hexdigest()[:8]})"


def check_losses(losses: Any, n: int) -> Tensor:
    """Return the result of a custom loss, or raise what is wrong with it."""
    if not isinstance(losses, Tensor) or losses.shape != (n,):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise invalid("the custom loss", f"one value per sample, a tensor of shape ({n},)", found)
    return losses


def check_metrics(values: Any) -> dict[str, float]:
    """Return the result of custom metrics, or raise what is wrong with it."""
    reserved = {"step", "loss", "lr", "grad_norm", "images", "seconds", "skipped", "val_loss", "val_loss_ema"}
    reserved |= {"probe_accuracy", "probe_t", "probe_block", "distillation_loss"}
    if not isinstance(values, Mapping):
        raise invalid("custom metrics", "a dict of names and numbers", type(values).__name__)
    for name, value in values.items():
        if not isinstance(name, str) or name in reserved:
            raise invalid("the name of a custom metric", f"text other than {', '.join(sorted(reserved))}", name)
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise invalid(f"custom metric {name!r}", "a number", type(value).__name__)
    return {name: float(value) for name, value in values.items()}
