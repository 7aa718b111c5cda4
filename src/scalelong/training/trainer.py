"""One training step, and the state it changes. `scalelong.training.loop` runs the steps."""

from __future__ import annotations

import copy
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.lr_scheduler import LambdaLR

from scalelong import counter, mup
from scalelong._modules import evaluating
from scalelong.counter import Stream
from scalelong.diffusion import simple_loss
from scalelong.diffusion.network import drop_conditions, make_conditions, predict_noise
from scalelong.errors import InvalidValueError, RunError, invalid
from scalelong.models.registry import get_model
from scalelong.monitor.probe import probe_size
from scalelong.runs.config import Config
from scalelong.runs.run import build_network
from scalelong.training import checkpoint
from scalelong.training.checkpoint import Checkpoint, Progress
from scalelong.training.examples import Batch, Examples
from scalelong.training.own import Own, check_losses
from scalelong.training.schedule import lr_factor

if TYPE_CHECKING:
    from scalelong.monitor.monitor import StabilityMonitor


@dataclass(frozen=True)
class Outcome:
    """The result of one step. `grad_norm` is the norm before clipping. A skipped step changed nothing."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False


class NonFiniteError(RunError):
    """The loss, the gradient or a weight is not finite. The message names the module and the timesteps."""


class Ema:
    """Exponential moving average θ̄ ← d·θ̄ + (1 − d)·θ of the parameters, matched by name. Buffers are copied.

    `net` is a complete copy of the network, scaling included, in eval mode.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self._parameters: list[Tensor] = list(net.parameters())
        self._averages: list[Tensor] = [self.net.get_parameter(name) for name, _ in net.named_parameters()]
        self._buffers = [(self.net.get_buffer(name), buffer) for name, buffer in net.named_buffers()]

    def decay_at(self, update: int) -> float:
        """Return d for update `update` (from 1): constant, or min(d, (1 + u)/(10 + u)) with warm-up."""
        return min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, update: int) -> None:
        torch._foreach_lerp_(self._averages, self._parameters, 1.0 - self.decay_at(update))
        for average, buffer in self._buffers:
            average.copy_(buffer)


class Trainer:
    """Network, EMA, optimizer and data of a run after `progress.step` steps."""

    def __init__(self, config: Config, examples: Examples, own: Own | None = None) -> None:
        self.config, self.examples, self.own = config, examples, own or Own()
        self.accelerator = _accelerator(config)
        t, world = config.train, self.accelerator.num_processes
        if t.batch_size % (world * t.accumulate):
            expected = f"divisible by {world} process(es) × {t.accumulate} accumulation part(s)"
            raise invalid("train.batch_size", expected, t.batch_size)
        self.net = build_network(config, examples.shapes).to(self.accelerator.device)
        self.ema = Ema(self.net, config.ema.decay, config.ema.warmup)
        self.optimizer = (self.own.optimizer or partial(_adamw, config))(self.net)
        self.optimizer.register_step_post_hook(_increment_versions)
        self.schedule = LambdaLR(self.optimizer, partial(lr_factor, t))
        if t.compile:
            self.net.compile(fullgraph=True)
        self.adapt = get_model(config.model.kind).adapt
        self.wrapped, self.prepared = self.accelerator.prepare(self.net, self.optimizer)
        self.denoise = self.adapt(self.wrapped)
        self.null_y = examples.facts().null_y
        self.null_context: Tensor | None = None
        if examples.tokens is not None:
            self.null_context = torch.as_tensor(examples.tokens.empty).to(self.accelerator.device)
        self.progress = Progress()
        self.monitor: StabilityMonitor | None = None  # records steps if the loop sets one
        self.net.train()

    # ------------------------------------------------------------------------------------ one step

    def step(self) -> Outcome:
        """Run step `progress.step + 1`: batch, loss, gradient, clipping, AdamW, EMA. A function of (config, step)."""
        started = time.perf_counter()
        t, number = self.config.train, self.progress.step + 1
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        with self._monitored(number):
            for part in range(t.accumulate):
                with self.accelerator.accumulate(self.wrapped):
                    batch = self.batch(number, part)
                    self._seed_dropout(number, part)
                    losses = self.losses(batch)
                    part_loss = losses.mean()
                    self.accelerator.backward(part_loss)
                    loss += part_loss.detach() / t.accumulate
                    self._record(loss=losses, t=batch.t)
        grad_norm = self._clipped_norm()
        self._record(grad_norm=grad_norm)
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, reduction="mean")
        values = torch.stack([loss.float(), grad_norm.float()]).tolist()  # one transfer from the device
        skipped = self._must_skip(values[0], values[1], number)
        if not skipped:
            self.prepared.step()
            skipped = bool(self.prepared.step_was_skipped)  # fp16's scaler found an overflow
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        if not skipped:
            self.schedule.step()
            self.ema.update(self.progress.updates + 1)
        self.progress = replace(
            self.progress,
            step=number,
            updates=self.progress.updates + (not skipped),
            images=self.progress.images + t.batch_size,
            seconds=self.progress.seconds + time.perf_counter() - started,
        )
        return Outcome(loss=values[0], grad_norm=values[1], lr=lr, skipped=skipped)

    def batch(self, step: int, part: int = 0) -> Batch:
        """Return this process's `part` of the batch of step `step`."""
        t, world = self.config.train, self.accelerator.num_processes
        count = t.batch_size // (world * t.accumulate)
        first = (self.accelerator.process_index * t.accumulate + part) * count
        return self.examples.batch(step, first, count).to(self.accelerator.device)

    def _seed_dropout(self, step: int, part: int) -> None:
        """Dropout draws from torch's global generator: seed it by (seed, step, share), so that resuming is exact."""
        if any(isinstance(module, _DropoutNd) and module.p > 0 for module in self.net.modules()):
            share = self.accelerator.process_index * self.config.train.accumulate + part
            torch.manual_seed(int(counter.integers(self.config.seed, Stream.DROPOUT, step, share, 1, 2**31)))

    def losses(self, batch: Batch, net: nn.Module | None = None) -> Tensor:
        """Return the loss of each sample, (B,), of the network in training or of `net`."""
        denoise, process = self.denoise if net is None else self.adapt(net), self.examples.process
        nulls = {"y": self.null_y, "context": self.null_context}
        with self.accelerator.autocast():
            if self.own.loss is None:
                null: dict[str, Any] = {f"null_{name}": value for name, value in nulls.items()}
                return simple_loss(denoise, process, **vars(batch), **null)
            conditions = drop_conditions(make_conditions(batch.y, batch.context), batch.drop, nulls)
            eps_fn = partial(predict_noise, denoise, process, conditions=conditions, extra=batch.extra)
            return check_losses(self.own.loss(eps_fn, process, batch), len(batch.t))

    def _clipped_norm(self) -> Tensor:
        """Clip the gradient if asked. Returns its norm before clipping."""
        limit = self.config.train.clip
        if limit is not None:
            return self.accelerator.clip_grad_norm_(self.net.parameters(), limit)
        self.accelerator.unscale_gradients(self.prepared)
        return torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])

    def _must_skip(self, loss: float, grad_norm: float, number: int) -> bool:
        """False for a finite step, and for an overflow that fp16's scaler skips itself. Raises if so configured."""
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.accelerator.scaler is not None):
            return False
        if self.config.train.nonfinite == "skip":
            return True
        from scalelong.monitor.nonfinite import first_nonfinite

        batch = self.batch(number)
        where = first_nonfinite(self.net, lambda: self.losses(batch).mean())
        raise NonFiniteError(
            f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite at step {number} (loss {loss:g}, "
            f"gradient norm {grad_norm:g}); {where}; timesteps in the batch: {batch.t.min().item():.4g} to "
            f"{batch.t.max().item():.4g}. The last checkpoint is intact. Try a lower learning rate, clipping or a "
            "smaller kappa, or skip such steps with train.nonfinite=skip"
        )

    # ---------------------------------------------------------------------------- monitor and validation

    def _monitored(self, number: int) -> AbstractContextManager[None]:
        if self.monitor is None:
            return nullcontext()
        return self.monitor.step(number, batch=partial(self._replay, number) if self.config.train.compile else None)

    def _record(self, **values: Tensor) -> None:
        if self.monitor is not None:
            self.monitor.note(**values)

    def _replay(self, number: int, net: nn.Module) -> Tensor:
        """Repeat a few samples of step `number` eagerly: the monitor's hooks do not run in compiled code."""
        return self.losses(self.batch(number).part(0, probe_size(self.config.train.batch_size)), net)

    @torch.no_grad()
    def validation_loss(self, held_out: Examples, n: int, net: nn.Module | None = None) -> float:
        """Return the mean loss on `n` fixed images, times and noises, in eval mode."""
        net = self.net if net is None else net
        probe, size, total = held_out.probe(n), self.config.train.batch_size, 0.0
        with evaluating(net):
            for start in range(0, len(probe.x_0), size):
                part = probe.part(start, size).to(self.accelerator.device)
                total += self.losses(part, net).double().sum().item()
        return total / len(probe.x_0)

    # --------------------------------------------------------------------------------------------- state

    def state(self) -> Checkpoint:
        """Return the state for a checkpoint. Raises if a weight is not finite: it must not replace a good one."""
        bad = [name for name, p in self.net.named_parameters() if not bool(p.isfinite().all())]
        if bad:
            raise NonFiniteError(
                f"{bad[0]} is not finite after step {self.progress.step} ({len(bad)} parameter(s) in total); no "
                "checkpoint was written, the previous one is intact. Try a lower learning rate or clipping"
            )
        scaler = self.accelerator.scaler
        return Checkpoint(
            progress=self.progress,
            model=self.net.state_dict(),
            ema=self.ema.net.state_dict(),
            optimizer=checkpoint.optimizer_tensors(self.optimizer, self.net),
            scaler={} if scaler is None else scaler.state_dict(),
            groups=checkpoint.optimizer_groups(self.optimizer) if self.own.optimizer else [],
        )

    def restore(self, state: Checkpoint) -> None:
        self.net.load_state_dict(state.model)
        self.ema.net.load_state_dict(state.ema)
        checkpoint.restore_optimizer(self.optimizer, self.net, state.optimizer, state.groups)
        if self.accelerator.scaler is not None and state.scaler:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.progress = state.progress
        self.schedule = LambdaLR(self.optimizer, partial(lr_factor, self.config.train), self.progress.updates - 1)


def _adamw(config: Config, net: nn.Module) -> torch.optim.Optimizer:
    t, m = config.train, config.mup
    groups: Any = net.parameters()
    if m.base_width is not None or m.base_depth is not None:
        groups = mup.param_groups(net, t.lr, t.weight_decay, m.base_width, m.base_depth, eps=1e-8)
    fused = all(p.device.type in ("cuda", "cpu") and p.is_floating_point() for p in net.parameters())
    settings: dict[str, Any] = {"lr": t.lr, "betas": t.betas, "weight_decay": t.weight_decay, "fused": fused}
    return torch.optim.AdamW(groups, **settings)


def _increment_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Tell autograd that the parameters changed. torch's fused AdamW does not, so that backward() through a graph from
    before the step would silently return wrong gradients instead of raising."""
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def _accelerator(config: Config) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    t = config.train
    if t.precision == "fp16" and not torch.cuda.is_available():
        raise InvalidValueError("train.precision=fp16 needs a CUDA GPU; use --set train.precision=bf16 or fp32")
    AcceleratorState._reset_state()  # an earlier run in this process may have used another precision
    # accelerate joins CPU processes only if asked; otherwise each would consider itself the only one
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    accelerator = Accelerator(
        cpu=many and not torch.cuda.is_available(),
        mixed_precision="no" if t.precision == "fp32" else t.precision,
        gradient_accumulation_steps=t.accumulate,
        step_scheduler_with_optimizer=False,
    )
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise InvalidValueError(
            f"training supports one device or DDP, got {accelerator.distributed_type.value}; launch with --multi_gpu"
        )
    return accelerator
