"""The stability monitor as a Lightning callback.

scalelong.apply(module.unet, ConstantScaling(0.7))
trainer = Trainer(callbacks=[StabilityCallback(out="stability.jsonl")])
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn

from scalelong.errors import ScaleLongError, ScalingStateError, require
from scalelong.monitor.monitor import StabilityMonitor
from scalelong.monitor.steps import Steps
from scalelong.skips.finders import find_sites
from scalelong.skips.hooks import scaling_of

# Either package; a callback must be of the one that the user's Trainer comes from, and most have only one.
PACKAGE = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
LIGHTNING = require(PACKAGE, "lightning", "StabilityCallback")
Callback: Any = LIGHTNING.Callback


class StabilityCallback(Callback):
    """Record every optimizer step of a `Trainer` with `StabilityMonitor`.

    Gradients are recorded before clipping, unscaled under mixed precision. Loss and metrics go to the trainer's
    loggers under `stability/…`. `callback.watch` is the monitor, from the start of training on.

    Args:
        net: Returns the network of a LightningModule, such as `lambda module: module.unet`. Default: the scaled network
            in it, else the only one whose long skips are known, else the module itself if it has a `forward`.
        options: Arguments of `StabilityMonitor`: `every`, `out`, `probe`, `limits`, `on_alarm`, …

    Example:
        >>> trainer = Trainer(callbacks=[StabilityCallback(every=10, out="stability.jsonl")])
    """

    def __init__(self, net: Callable[[Any], nn.Module] | None = None, **options: Any) -> None:
        super().__init__()
        self._net, self._options = net, options
        self.watch: StabilityMonitor | None = None
        self._steps: Steps | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def log(scalars: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)

        net = _network(pl_module) if self._net is None else self._net(pl_module)
        self.watch = StabilityMonitor(net, **{"log": log, **self._options})
        self._steps = Steps(self.watch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._steps is not None:
            self._steps.begin(trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._steps is not None:
            self._steps.end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.watch is not None and loss is not None:
            # Lightning divides the loss where it calls the optimizer itself.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.watch.note(loss=loss.detach() * parts)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._steps is not None:
            self._steps.abandon(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._steps is not None:
            self._steps.abandon()


def _network(module: Any) -> nn.Module:
    """Return the network that is trained: Lightning calls `training_step` of the module, not the module."""
    known = list[str]()
    for path, part in module.named_modules():
        if scaling_of(part) is not None:
            return module  # in which the monitor finds it
        if not any(not outer or path.startswith(f"{outer}.") for outer in known) and _has_long_skips(part):
            known.append(path)
    if len(known) == 1:
        return module.get_submodule(known[0])
    if type(module).forward is not LIGHTNING.LightningModule.forward:
        return module
    found = ", ".join(f"module.{path}" for path in known) or "none"
    hint = f"pass it: StabilityCallback(net=lambda module: {f'module.{known[0]}' if known else 'module.unet'})"
    raise ScalingStateError(
        f"{type(module).__name__} holds {len(known)} networks with known long skips ({found}), none of them scaled, so "
        f"the network to record is not clear; {hint}"
    )


def _has_long_skips(part: nn.Module) -> bool:
    try:
        return bool(find_sites(part))
    except ScaleLongError:
        return False
