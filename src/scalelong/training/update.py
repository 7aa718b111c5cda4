"""The update of one step: optimizer, learning rate and EMA. A step that is not finite changes none of them.

Nothing here waits for the device. Whether a step is finite stays a tensor: torch's fused optimizers read it
(`found_inf`) and leave the weights alone, so the host learns of a bad step only when it reads the log.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.runs.config import TrainConfig
from scalelong.training.schedule import lr_factor
from scalelong.training.sharding import local


class Ema:
    """Exponential moving average θ̄ ← d·θ̄ + (1 − d)·θ of the parameters, matched by name. Buffers are copied.

    `net` is a complete copy of the network, scaling included, in eval mode.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.follow(net)

    def follow(self, net: nn.Module) -> None:
        """Average the parameters of `net`, which has those of the network it was made of, perhaps sharded since."""
        self._parameters = [local(p).detach() for p in net.parameters()]
        self._averages = [local(self.net.get_parameter(name)).detach() for name, _ in net.named_parameters()]
        self._buffers = [(self.net.get_buffer(name), buffer) for name, buffer in net.named_buffers()]

    def decay_at(self, update: Any) -> Any:
        """Return d for update `update` (from 1): constant, or min(d, (1 + u)/(10 + u)) with warm-up."""
        if not self.warmup:
            return self.decay
        share = (1 + update) / (10 + update)
        return share.clamp(max=self.decay) if isinstance(share, Tensor) else min(self.decay, share)

    @torch.no_grad()
    def update(self, update: int) -> None:
        torch._foreach_lerp_(self._averages, self._parameters, 1.0 - self.decay_at(update))
        for average, buffer in self._buffers:
            average.copy_(buffer)

    @torch.no_grad()
    def update_unless(self, skip: Tensor, update: Tensor) -> None:
        """The same for a step that the device may skip."""
        weight = ((1.0 - self.decay_at(update)) * ~skip).float()  # 0 leaves the averages as they are
        torch._foreach_lerp_(self._averages, self._parameters, [weight] * len(self._averages))
        for average, buffer in self._buffers:
            average.copy_(torch.where(skip, average, buffer))


class Update:
    """Applies steps. `count()` is the number of applied ones, which drives the schedule and the EMA.

    - train.nonfinite=stop: from the first bad step on nothing changes, so that `first_bad()` can be run again.
    - train.nonfinite=skip, and overflows that fp16's gradient scaling handles: the device counts updates and takes the
      learning rate from a table.
    - An optimizer that cannot read `found_inf` needs the host to decide, which waits for the device at every step.
    """

    def __init__(
        self, train: TrainConfig, optimizer: torch.optim.Optimizer, ema: Ema, scaler: Any, device: Any
    ) -> None:
        self.train, self.optimizer, self.ema, self.scaler = train, optimizer, ema, scaler
        self.fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.stops = train.nonfinite == "stop"
        self.counts_on_device = self.fused and (not self.stops or scaler is not None)
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.set_count(0)

    def set_count(self, updates: int) -> None:
        """Resume after `updates` updates."""
        self._count, device = updates, self._first_bad.device
        if not self.counts_on_device:
            return
        self._count_on_device = torch.tensor(updates, device=device)
        kind = torch.float64 if device.type == "cpu" else torch.float32  # what the fused kernels read
        factors = [lr_factor(self.train, update) for update in range(self.train.steps)]
        self._factors = torch.tensor(factors, dtype=torch.float64).to(device)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.zeros((), dtype=kind, device=device)

    def count(self) -> int:
        return int(self._count_on_device) if self.counts_on_device else self._count

    def first_bad(self) -> int | None:
        """Return the first step that was not finite under train.nonfinite=stop. Waits for the device."""
        return int(self._first_bad) or None

    @torch.no_grad()
    def apply(self, number: int, loss: Tensor, grad_norm: Tensor) -> tuple[Tensor | float, Tensor]:
        """Change weights and averages by step `number`, whose gradients are in place, unless it is not finite.

        Returns the learning rate and whether the step was skipped, on the device.
        """
        skip, lr = self._must_skip(number, loss, grad_norm), self._set_lr()
        if self.fused:
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            if self.counts_on_device:
                self._count_on_device += ~skip
                self.ema.update_unless(skip, self._count_on_device)
            else:
                self._count += 1
                self.ema.update(self._count)
        elif not skip.item():
            self.optimizer.step()
            self._count += 1
            self.ema.update(self._count)
        if self.scaler is not None:
            self.scaler.update()
        return lr.clone() if isinstance(lr, Tensor) else lr, skip

    def _must_skip(self, number: int, loss: Tensor, grad_norm: Tensor) -> Tensor:
        overflow, broken = ~grad_norm.isfinite(), ~loss.isfinite()
        if not self.stops:
            return overflow | broken
        # fp16's scaler answers an overflow by a lower scale; below 1 the gradients overflow by themselves.
        broken |= overflow if self.scaler is None else overflow & (self.scaler._scale < 1)
        self._first_bad = torch.where(broken & (self._first_bad == 0), number, self._first_bad)
        return (self._first_bad > 0) | overflow

    def _set_lr(self) -> Any:
        """Set the learning rate of every group. Returns that of the first."""
        if self.counts_on_device:  # `take`, because indexing by a tensor of one number would read it
            factor = self._factors.take(self._count_on_device.clamp(max=len(self._factors) - 1))
            for group in self.optimizer.param_groups:
                group["lr"].copy_(group["initial_lr"] * factor)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_factor(self.train, self._count)
        return self.optimizer.param_groups[0]["lr"]
