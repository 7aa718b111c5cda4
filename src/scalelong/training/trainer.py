"""What a training run is made of, and one step of it. The loop around it is `scalelong.training.loop`."""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalelong.diffusion import simple_loss
from scalelong.diffusion.network import Denoiser
from scalelong.errors import ScaleLongError
from scalelong.monitor.probe import probe_size
from scalelong.runs.config import Config
from scalelong.runs.run import build_network
from scalelong.training import checkpoint
from scalelong.training.checkpoint import Checkpoint, Progress
from scalelong.training.ema import Ema
from scalelong.training.examples import Batch, Examples

if TYPE_CHECKING:
    from scalelong.monitor.monitor import StabilityMonitor

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Outcome:
    """What one step showed. Norms are of the whole gradient before clipping; `skipped` steps changed nothing."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False


class NonFiniteError(ScaleLongError):
    """The loss or the gradient is not finite; the message names the module and the timesteps."""


class Trainer:
    """Network, EMA, optimizer and data of a run, in the state after `progress.step` steps."""

    def __init__(self, config: Config, examples: Examples) -> None:
        self.config, self.examples = config, examples
        self.accelerator = _accelerator(config)
        self._check_split()
        self.net = build_network(config, examples.shapes).to(self.accelerator.device)
        self.ema = Ema(self.net, config.ema.decay, config.ema.warmup)
        t = config.train
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=_fused(self.net)
        )
        if t.compile:
            self.net.compile(fullgraph=True)
        self.wrapped, self.prepared = self.accelerator.prepare(self.net, self.optimizer)
        self.denoise = Denoiser(self.wrapped)
        self.null_context = _moved(examples.null_context, self.accelerator.device)
        self.progress = Progress()
        self.watch: StabilityMonitor | None = None  # looks at steps on their way, where the loop sets one
        self.net.train()

    # ------------------------------------------------------------------------------------ one step

    def step(self) -> Outcome:
        """Step `progress.step + 1`: batch, loss, gradient, clipping, AdamW, EMA. A function of (config, step)."""
        started = time.perf_counter()
        t, number = self.config.train, self.progress.step + 1
        lr = t.lr * min(1.0, (self.progress.updates + 1) / max(1, t.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        with self._watched(number):
            for part in range(t.accumulate):
                with self.accelerator.accumulate(self.wrapped):
                    batch = self.batch(number, part)
                    losses = self.losses(batch)
                    part_loss = losses.mean()
                    self.accelerator.backward(part_loss)
                    loss += part_loss.detach() / t.accumulate
                    self._note(loss=losses, t=batch.t)
        grad_norm = self._clipped_norm()
        self._note(grad_norm=grad_norm)
        seen = self._agreed(loss, grad_norm)
        skipped = self._skips(seen, number)
        if not skipped:
            self.prepared.step()
            skipped = bool(self.prepared.step_was_skipped)  # fp16's scaler found an overflow
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        if not skipped:
            self.ema.update(self.progress.updates + 1)
        self.progress = replace(
            self.progress,
            step=number,
            updates=self.progress.updates + (not skipped),
            images=self.progress.images + t.batch_size,
            seconds=self.progress.seconds + time.perf_counter() - started,
        )
        return Outcome(loss=seen[0], grad_norm=seen[1], lr=lr, skipped=skipped)

    def batch(self, step: int, part: int = 0) -> Batch:
        """This process's `part` of step `step`'s batch."""
        t, world = self.config.train, self.accelerator.num_processes
        count = t.batch_size // (world * t.accumulate)
        first = (self.accelerator.process_index * t.accumulate + part) * count
        return self.examples.batch(step, first, count).to(self.accelerator.device)

    def loss(self, batch: Batch) -> Tensor:
        return self.losses(batch).mean()

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each sample."""
        with self.accelerator.autocast():
            return self._losses(self.denoise, batch)

    def _losses(self, net: nn.Module, batch: Batch) -> Tensor:
        return simple_loss(
            net,
            self.examples.process,
            batch.x_0,
            batch.t,
            batch.eps,
            **batch.conditions(),
            null_y=self.examples.null_y,
            null_context=self.null_context,
        )

    def _clipped_norm(self) -> Tensor:
        """Clip where asked; the norm is the one before clipping either way."""
        limit = self.config.train.clip
        if limit is not None:
            return self.accelerator.clip_grad_norm_(self.net.parameters(), limit)
        self.accelerator.unscale_gradients(self.prepared)
        return torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])

    def _agreed(self, loss: Tensor, grad_norm: Tensor) -> tuple[float, float]:
        """Mean loss over all processes and the gradient's norm, with one look at the device."""
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, reduction="mean")
        pair = torch.stack([loss.float(), grad_norm.float()]).tolist()
        return pair[0], pair[1]

    def _skips(self, seen: tuple[float, float], number: int) -> bool:
        """False for a finite step. Otherwise skip it, leave it to fp16's scaler, or stop with a diagnosis."""
        finite = [math.isfinite(value) for value in seen]
        if all(finite):
            return False
        if self.accelerator.scaler is not None and finite[0]:
            return False  # the scaler skips it itself and lowers its scale
        if self.config.train.nonfinite == "skip":
            return True
        raise NonFiniteError(self._diagnosis(seen, number))

    def _diagnosis(self, seen: tuple[float, float], number: int) -> str:
        from scalelong.monitor.nonfinite import first_nonfinite

        what = "loss" if not math.isfinite(seen[0]) else "gradient"
        batch = self.batch(number)
        where = first_nonfinite(self.net, lambda: self.loss(batch))
        low, high = batch.t.min().item(), batch.t.max().item()
        return (
            f"the {what} is not finite at step {number} (loss {seen[0]:g}, gradient norm {seen[1]:g}); {where}; "
            f"timesteps in the batch: {low:.4g} to {high:.4g}. Nothing was written over the last checkpoint. "
            "A lower learning rate, clipping or a smaller kappa may help; train.nonfinite=skip leaves such steps out"
        )

    # ------------------------------------------------------------------------------------ looking at it

    def _watched(self, number: int) -> AbstractContextManager[None]:
        if self.watch is None:
            return nullcontext()
        return self.watch.step(number, batch=partial(self._again, number) if self.config.train.compile else None)

    def _note(self, **seen: Tensor) -> None:
        if self.watch is not None:
            self.watch.note(**seen)

    def _again(self, number: int, net: nn.Module) -> Tensor:
        """A few samples of step `number` once more, for the monitor, whose hooks do not see a compiled pass."""
        with self.accelerator.autocast():
            return self._losses(Denoiser(net), self.batch(number).part(0, probe_size(self.config.train.batch_size)))

    @torch.no_grad()
    def validation_loss(self, held_out: Examples, n: int, net: nn.Module | None = None) -> float:
        """Mean loss on fixed images, times and noise, without gradients, in eval mode."""
        from scalelong._modules import evaluating

        inner = net or self.net
        device, total, probe = self.accelerator.device, 0.0, held_out.probe(n)
        size = self.config.train.batch_size
        with evaluating(inner), self.accelerator.autocast():
            for start in range(0, len(probe.x_0), size):
                part = probe.part(start, size).to(device)
                total += self._losses(Denoiser(inner), part).double().sum().item()
        return total / len(probe.x_0)

    # ------------------------------------------------------------------------------------ state

    def state(self) -> Checkpoint:
        """For a checkpoint. Weights that are not finite are none: they must not take a good one's place."""
        scaler = self.accelerator.scaler
        spoilt = [name for name, p in self.net.named_parameters() if not bool(p.isfinite().all())]
        if spoilt:
            raise NonFiniteError(
                f"after step {self.progress.step} {spoilt[0]} is not finite ({len(spoilt)} parameters in all); "
                "no checkpoint was written, the one before is kept. A lower learning rate or clipping may help"
            )
        return Checkpoint(
            progress=self.progress,
            model=self.net.state_dict(),
            ema=self.ema.net.state_dict(),
            optimizer=checkpoint.optimizer_tensors(self.optimizer, self.net),
            scaler={} if scaler is None else scaler.state_dict(),
        )

    def restore(self, state: Checkpoint) -> None:
        self.net.load_state_dict(state.model)
        self.ema.net.load_state_dict(state.ema)
        checkpoint.restore_optimizer(self.optimizer, self.net, state.optimizer)
        if self.accelerator.scaler is not None and state.scaler:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.progress = state.progress

    def _check_split(self) -> None:
        t, world = self.config.train, self.accelerator.num_processes
        if t.batch_size % (world * t.accumulate):
            raise ScaleLongError(
                f"train.batch_size {t.batch_size} is not divisible by {world} process(es) × "
                f"{t.accumulate} accumulation part(s)"
            )


def _accelerator(config: Config) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    t = config.train
    if t.precision == "fp16" and not torch.cuda.is_available():
        raise ScaleLongError("train.precision=fp16 needs a CUDA GPU; here take --set train.precision=bf16 or fp32")
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    # accelerate joins processes on CPUs only when told to; without it each would take itself for the only one
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(
        cpu=many and not torch.cuda.is_available(),
        mixed_precision=PRECISIONS[t.precision],
        gradient_accumulation_steps=t.accumulate,
        step_scheduler_with_optimizer=False,
    )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ScaleLongError(
            f"training runs on one device or with DDP, not under {accelerator.distributed_type.value}; "
            "launch it with --multi_gpu"
        )
    return accelerator


def _fused(net: nn.Module) -> bool:
    """AdamW in one kernel, where torch has it for every parameter's device."""
    return all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in net.parameters())


def _moved(value: Tensor | None, device: torch.device) -> Tensor | None:
    return None if value is None else value.to(device)
