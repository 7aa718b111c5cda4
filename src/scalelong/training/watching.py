"""The stability monitor of a run: its probe from held-out images, its file in the run folder."""

from __future__ import annotations

from torch import Tensor, nn

from scalelong.diffusion.network import Denoiser
from scalelong.monitor.monitor import StabilityMonitor
from scalelong.monitor.probe import probe_size
from scalelong.runs.run import Run
from scalelong.training.display import Display
from scalelong.training.examples import Batch, Examples
from scalelong.training.trainer import Trainer


class FixedBatch:
    """A call of the network on the same noisy images each time, in the run's precision."""

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        process = trainer.examples.process
        self.autocast, self.denoise = trainer.accelerator.autocast, Denoiser(trainer.net)
        self.x_t = process.add_noise(batch.x_0, batch.eps, batch.t)
        self.t = process.network_time(batch.t).to(self.x_t.device)
        self.conditions = {"y": batch.y, "context": batch.context}

    def __call__(self, net: nn.Module) -> Tensor:
        with self.autocast():
            return self.denoise(self.x_t, self.t, **self.conditions)


def watch(trainer: Trainer, held_out: Examples | None, run: Run, display: Display) -> StabilityMonitor:
    """A monitor that looks every `monitor.every` steps and writes stability.jsonl."""
    process, config = trainer.examples.process, trainer.config
    samples = config.monitor.samples or probe_size(config.train.batch_size)
    batch = (held_out or trainer.examples).probe(samples).to(trainer.accelerator.device)
    return StabilityMonitor(
        trainer.net,
        probe=FixedBatch(trainer, batch),
        t=batch.t,
        every=config.monitor.every,
        out=run.stability_path,
        ema=trainer.ema.net,
        scaler=trainer.accelerator.scaler,
        times=(0.0, process.t_max),
        log=trainer.accelerator.log if config.tracker else None,
        on_alarm=lambda alarm: display.say(f"alarm, {alarm}"),
    )
