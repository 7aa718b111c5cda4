"""The stability monitor of a run: its probe from held-out images, its file in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from scalelong.models.denoiser import Denoiser
from scalelong.stability.monitor import StabilityMonitor
from scalelong.stability.probe import SAMPLES
from scalelong.training.display import Display
from scalelong.training.examples import Batch, Examples
from scalelong.training.run import Run
from scalelong.training.trainer import Trainer


@dataclass(frozen=True)
class FixedBatch:
    """A call of the network on the same noisy images each time, in the run's precision."""

    trainer: Trainer
    batch: Batch

    def __call__(self, net: nn.Module) -> Any:
        batch, process = self.batch, self.trainer.examples.process
        with self.trainer.accelerator.autocast():
            x_t = process.add_noise(batch.x_0, batch.eps, batch.t)
            conditions = {"y": batch.y, "context": batch.context}
            return Denoiser(net)(x_t, process.network_time(batch.t).to(x_t.device), **conditions)


def watch(trainer: Trainer, held_out: Examples | None, run: Run, display: Display) -> StabilityMonitor:
    """A monitor that looks every `monitor.every` steps and writes stability.jsonl."""
    process, config = trainer.examples.process, trainer.config
    batch = (held_out or trainer.examples).probe(SAMPLES).to(trainer.accelerator.device)
    return StabilityMonitor(
        trainer.net,
        probe=FixedBatch(trainer, batch),
        t=batch.t,
        every=config.monitor.every,
        out=run.stability,
        ema=trainer.ema.net,
        scaler=trainer.accelerator.scaler,
        times=(0.0, process.t_max),
        log=trainer.accelerator.log if config.tracker else None,
        on_alarm=lambda alarm: display.say(f"alarm, {alarm}"),
    )
