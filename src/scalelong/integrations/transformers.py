"""The stability monitor as a callback of Hugging Face's `Trainer`.

scalelong.apply(model.unet, ConstantScaling(0.7))
trainer = Trainer(model, args, train_dataset=data, callbacks=[StabilityCallback(out="stability.jsonl")])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from scalelong.errors import require
from scalelong.monitor.monitor import StabilityMonitor
from scalelong.monitor.steps import Steps

TrainerCallback: Any = require("transformers", "text", "StabilityCallback").TrainerCallback


class StabilityCallback(TrainerCallback):
    """Record every optimizer step of a `Trainer` with `StabilityMonitor`.

    `Trainer` clips before it calls its callbacks: a snapshot's gradient norms are those after clipping
    (`max_grad_norm`). The norm that `Trainer` logs, before clipping, counts in the maximum of the next snapshot.
    `callback.watch` is the monitor, from the start of training on.

    Args:
        net: Returns the network of the trained model, such as `lambda model: model.unet`. Default: the model itself,
            in which the scaled network is found.
        options: Arguments of `StabilityMonitor`: `every`, `out`, `probe`, `limits`, `on_alarm`, `log`, …

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[StabilityCallback(out="stability.jsonl")])
    """

    def __init__(self, net: Callable[[Any], nn.Module] | None = None, **options: Any) -> None:
        self._net, self._options = net, options
        self.watch: StabilityMonitor | None = None
        self._steps: Steps | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.watch = StabilityMonitor(model if self._net is None else self._net(model), **self._options)
        self.watch.clipped = True
        self._steps = Steps(self.watch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._steps.begin(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._steps.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.watch is not None and "loss" in (logs or {}):
            self.watch.note(loss=float(logs["loss"]), grad_norm=logs.get("grad_norm"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._steps is not None:
            self._steps.abandon()
