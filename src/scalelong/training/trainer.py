"""One training step, and the state it changes. `scalelong.training.loop` runs the steps."""

from __future__ import annotations

import copy
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from scalelong import counter, mup
from scalelong._modules import eager, evaluating
from scalelong.counter import Stream
from scalelong.diffusion import simple_loss
from scalelong.diffusion.network import drop_conditions, make_conditions, predict_noise
from scalelong.errors import NonFiniteError, invalid
from scalelong.models.registry import get_model
from scalelong.monitor.probe import probe_size
from scalelong.runs.config import Config
from scalelong.runs.run import build_network
from scalelong.training import checkpoint, parallel, sharding
from scalelong.training.ahead import Ahead
from scalelong.training.checkpoint import Checkpoint, Progress
from scalelong.training.distillation import PREFIX, Distillation
from scalelong.training.examples import Batch, Examples
from scalelong.training.own import Own, check_losses
from scalelong.training.update import Ema, Update

if TYPE_CHECKING:
    from scalelong.monitor.monitor import StabilityMonitor


class Outcome:
    """The result of one step. `grad_norm` is the norm before clipping. A skipped step changed nothing.

    The values are on the device until one of them is read, which waits for the device.
    """

    def __init__(self, *values: Tensor | float) -> None:
        self.values = values  # loss, grad_norm, lr, skipped

    @cached_property
    def _read(self) -> list[float]:
        device = self.values[0].device  # type: ignore[union-attr]
        real = torch.float32 if device.type == "mps" else torch.float64
        scalars = [torch.as_tensor(value, dtype=real, device=device) for value in self.values]
        return torch.stack(scalars).tolist()  # one transfer from the device

    loss = property(lambda self: self._read[0])
    grad_norm = property(lambda self: self._read[1])
    lr = property(lambda self: self._read[2])
    skipped = property(lambda self: bool(self._read[3]))


class Trainer:
    """Network, EMA, optimizer and data of a run after `progress.step` steps."""

    def __init__(self, config: Config, examples: Examples, own: Own | None = None) -> None:
        self.config, self.examples, self.own = config, examples, own or Own()
        self.sharded = parallel.is_sharded(config.train)
        if self.sharded and config.train.compile == "whole":
            raise invalid(
                "train.compile", "blocks or off with FSDP, whose hooks a single graph cannot contain", "whole"
            )
        self.accelerator = parallel.make_accelerator(config.train)
        t, device, world = config.train, self.accelerator.device, self.accelerator.num_processes
        if t.batch_size % (world * t.accumulate):
            expected = f"divisible by {world} process(es) × {t.accumulate} accumulation part(s)"
            raise invalid("train.batch_size", expected, t.batch_size)
        self.net = parallel.fast_layout(build_network(config, examples.shapes).to(device), self.sharded)
        self.ema = Ema(self.net, config.ema.decay, config.ema.warmup)
        if self.sharded:
            self.copies = [copy.deepcopy(self.ema.net) for _ in range(2)]  # whole, for sampling and validation
            parallel.compile_network(self.net, t.compile)
            for network in (self.net, self.ema.net):
                sharding.shard(network, device)
        self.optimizer = (self.own.optimizer or partial(_adamw, config))(self.net)
        self.shards = sharding.use_local_shards(self.optimizer) if self.sharded else []
        self.optimizer.register_step_post_hook(_increment_versions)
        self.update = Update(t, self.optimizer, self.ema, self.accelerator.scaler, device)
        self.adapt = get_model(config.model.kind).adapt
        if self.sharded:
            self.wrapped, self.prepared = self.net, self.accelerator.prepare(self.optimizer)
        else:
            parallel.compile_network(self.net, t.compile)
            self.wrapped, self.prepared = self.accelerator.prepare(self.net, self.optimizer)
        self.ema.follow(self.net)  # sharding and `prepare` may have moved the parameters to other memory
        self.denoise = self.adapt(self.wrapped)
        self.null_y = examples.facts().null_y
        self.null_context: Tensor | None = None
        if examples.tokens is not None:
            self.null_context = torch.as_tensor(examples.tokens.empty).to(device)
        self.progress = Progress()
        self.parts = Ahead(self._parts)
        self.distillation: Distillation | None = None
        if config.distillation.weight:
            if self.sharded:
                raise invalid("train.parallel", "ddp with distillation.weight > 0", "fsdp")
            self.distillation = Distillation(config, self.net, self.ema, examples, self.accelerator)
        self.distillation_loss: Tensor | None = None  # of the last step
        self.monitor: StabilityMonitor | None = None  # records steps if the loop sets one
        rates = [m.p if isinstance(m, _DropoutNd) else vars(m).get("dropout") for m in self.net.modules()]
        self.has_dropout = any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)  # that modules declare
        self.net.train()

    # ------------------------------------------------------------------------------------ one step

    def step(self) -> Outcome:
        """Run step `progress.step + 1`: batch, loss, gradient, clipping, AdamW, EMA. A function of (config, step).

        The device is waited for only at steps that are logged, which is also when a non-finite step raises.
        """
        started = time.perf_counter()
        t, number = self.config.train, self.progress.step + 1
        self.net.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        synchronise = self.accelerator.accumulate if t.accumulate > 1 else nullcontext  # at the last part
        with self._monitored(number):
            parts = self.parts(number, more=number < t.steps)
            for part, prepared in enumerate(parts):
                with synchronise(self.wrapped):
                    batch = prepared.to(self.accelerator.device)
                    self._seed_dropout(number, part)
                    losses = self.losses(batch)
                    part_loss = losses.mean()
                    self.accelerator.backward(part_loss)
                    loss += part_loss.detach() / t.accumulate
                    self._record(loss=losses, t=batch.t)
        if self.distillation is not None:  # after the monitor, which records the pass of the denoising loss
            batch = parts[0].to(self.accelerator.device)
            self.distillation_loss = self.distillation.add_gradient(batch, number)
        grad_norm = self._clipped_norm()
        self._record(grad_norm=grad_norm)
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, reduction="mean")
        lr, skipped = self.update.apply(number, loss, grad_norm)
        outcome = Outcome(loss, grad_norm, lr, skipped)
        if self.distillation is not None:
            self.distillation.update(number, skipped)
        if due(number, t.log_every, number == t.steps) or not self.update.fused:
            self.check(outcome)
        self.progress = replace(
            self.progress,
            step=number,
            images=self.progress.images + t.batch_size,
            seconds=self.progress.seconds + time.perf_counter() - started,
        )
        return outcome

    def check(self, outcome: Outcome | None = None) -> None:
        """Wait for the device and count the updates. Raises if a step was not finite and the run must stop."""
        if (number := self.update.first_bad()) is not None:
            raise self._nonfinite(number, outcome)
        self.progress = replace(self.progress, updates=self.update.count())

    def batch(self, step: int, part: int = 0) -> Batch:
        """Return this process's `part` of the batch of step `step`."""
        return self._part(step, part).to(self.accelerator.device)

    def _part(self, step: int, part: int) -> Batch:
        t, world = self.config.train, self.accelerator.num_processes
        count = t.batch_size // (world * t.accumulate)
        first = (self.accelerator.process_index * t.accumulate + part) * count
        return self.examples.batch(step, first, count)

    def _parts(self, step: int) -> list[Batch]:
        """All parts in host memory, pinned if the device is a GPU, from where it copies them by itself."""
        parts = [self._part(step, part) for part in range(self.config.train.accumulate)]
        return [part.pinned() for part in parts] if self.accelerator.device.type == "cuda" else parts

    def _seed_dropout(self, step: int, part: int) -> None:
        """Dropout draws from torch's global generators: seed them by (seed, step, share), so that resuming is exact.

        At every step, because no module need show it (`F.dropout`, stochastic depth, a loss of your own).
        """
        device, share = self.accelerator.device, self.accelerator.process_index * self.config.train.accumulate + part
        seed = int(counter.integers(self.config.seed, Stream.DROPOUT, step, share, 1, 2**31).numpy()[0])
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 0.3 ms where a backend is not initialised
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)

    def losses(self, batch: Batch, net: nn.Module | None = None) -> Tensor:
        """Return the loss of each sample, (B,), of the network in training or of `net`."""
        denoise, objective = self.denoise if net is None else self.adapt(net), self.examples.objective
        nulls = {"y": self.null_y, "context": self.null_context}
        with self.accelerator.autocast():
            if self.own.loss is None:
                null: dict[str, Any] = {f"null_{name}": value for name, value in nulls.items()}
                return simple_loss(denoise, objective, **vars(batch), **null)
            conditions = drop_conditions(make_conditions(batch.y, batch.context), batch.drop, nulls)
            eps_fn = partial(predict_noise, denoise, objective, conditions=conditions, extra=batch.extra)
            return check_losses(self.own.loss(eps_fn, objective.process, batch), len(batch.t))

    def _clipped_norm(self) -> Tensor:
        """Clip the gradient if asked. Returns its norm before clipping."""
        scaler = self.accelerator.scaler
        for parameter, shard in self.shards:
            shard.grad = None if parameter.grad is None else sharding.local(parameter.grad)
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        every = [shard for _, shard in self.shards] if self.sharded else list(self.net.parameters())
        parameters = [p for p in every if p.grad is not None]
        total_norm = sharding.total_norm if self.sharded else torch.nn.utils.get_total_norm
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
        if scaler is not None and self.sharded:  # all lower the scale if one process's shards overflowed
            for found in scaler._found_inf_per_device(self.optimizer).values():
                found.copy_(~norm.isfinite())
        if self.config.train.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.train.clip, norm)
        return norm

    def _nonfinite(self, number: int, outcome: Outcome | None) -> NonFiniteError:
        """Run step `number` again, from the weights it had, and say what was not finite first."""
        from scalelong.monitor.nonfinite import first_nonfinite

        batch = self.batch(number)
        with eager(self.net):
            where = first_nonfinite(self.net, lambda: self.losses(batch, self.net).mean())
            loss = self.losses(batch, self.net).mean().item()
        last = f", gradient norm {outcome.grad_norm:g}" if outcome and number == self.progress.step + 1 else ""
        return NonFiniteError(
            f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite at step {number} (loss {loss:g}{last})"
            f"; {where}; timesteps in the batch: {batch.t.min().item():.4g} to {batch.t.max().item():.4g}. The last "
            "checkpoint is intact. Try a lower learning rate or clipping (with plain SGD, added skips and no "
            "normalization also a smaller kappa), or skip such steps with train.nonfinite=skip"
        )

    # ---------------------------------------------------------------------------- monitor and validation

    def _monitored(self, number: int) -> AbstractContextManager[None]:
        if self.monitor is None:
            return nullcontext()
        return self.monitor.step(
            number, batch=None if self.config.train.compile == "off" else partial(self._replay, number)
        )

    def _record(self, **values: Tensor) -> None:
        if self.monitor is not None:
            self.monitor.note(**values)

    def _replay(self, number: int, net: nn.Module) -> Tensor:
        """Repeat a few samples of step `number` eagerly: the monitor's hooks do not run in compiled code."""
        return self.losses(self.batch(number).part(0, probe_size(self.config.train.batch_size)), net)

    @torch.no_grad()
    def validation_loss(self, held_out: Examples, n: int, net: nn.Module | None = None) -> float:
        """Return the mean loss on `n` fixed images, times and noises, in eval mode. Every process takes its share."""
        net, world = self.net if net is None else net, self.accelerator.num_processes
        probe, total = held_out.probe(n, self.accelerator.process_index, world), 0.0
        size = self.config.train.batch_size // (world * self.config.train.accumulate)
        with evaluating(net), eager(net):  # another mode and batch size would compile the network again
            for start in range(0, len(probe.x_0), size):
                part = probe.part(start, size).to(self.accelerator.device)
                total += self.losses(part, net).cpu().double().sum().item()  # MPS has no float64
        if world > 1:
            sums = torch.tensor([total, len(probe.x_0)], dtype=torch.float64, device=self.accelerator.device)
            total, count = self.accelerator.reduce(sums).tolist()
            return total / count
        return total / len(probe.x_0)

    # --------------------------------------------------------------------------------------------- state

    def state(self) -> Checkpoint:
        """Return the state for a checkpoint. Raises if a step since the last log was not finite.

        Of a sharded network every process must call it.
        """
        self.check()
        scaler = self.accelerator.scaler
        return Checkpoint(
            progress=self.progress,
            model=sharding.whole(self.net.state_dict()),
            ema=sharding.whole(self.ema.net.state_dict()),
            optimizer={
                **checkpoint.optimizer_tensors(self.optimizer, self.net, self.shards),
                **({} if self.distillation is None else self.distillation.state()),
            },
            scaler={} if scaler is None else scaler.state_dict(),
            groups=checkpoint.optimizer_groups(self.optimizer) if self.own.optimizer else [],
        )

    def whole(self) -> tuple[nn.Module, nn.Module]:
        """Return the network and its average, gathered if they are sharded: then every process must call it."""
        if not self.sharded:
            return self.net, self.ema.net
        for copied, network in zip(self.copies, (self.net, self.ema.net), strict=True):
            copied.load_state_dict(sharding.whole(network.state_dict()))
        return self.copies[0], self.copies[1]

    def restore(self, state: Checkpoint) -> None:
        for network, tensors in ((self.net, state.model), (self.ema.net, state.ema)):
            if self.sharded:
                sharding.load_shares(network, tensors)
            else:
                network.load_state_dict(tensors)
        own = {key: value for key, value in state.optimizer.items() if key.startswith(f"{PREFIX}/")}
        rest = {key: value for key, value in state.optimizer.items() if key not in own}
        checkpoint.restore_optimizer(self.optimizer, self.net, rest, state.groups, self.shards)
        if self.distillation is not None:
            self.distillation.restore(own)
        if self.accelerator.scaler is not None and state.scaler:
            self.accelerator.scaler.load_state_dict(state.scaler)
        self.progress = state.progress
        self.update.set_count(self.progress.updates)


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


def due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
