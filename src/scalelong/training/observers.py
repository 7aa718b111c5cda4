"""What observes a run while it trains: monitor, validation, sample grids, evaluation. None changes a loss."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from scalelong.data.records import canonical_split
from scalelong.diffusion import RangeCheck
from scalelong.errors import MissingSplitError, ScaleLongError, SourceUnavailableError
from scalelong.evaluation.extractors import build_extractor
from scalelong.monitor.monitor import StabilityMonitor
from scalelong.monitor.probe import probe_size
from scalelong.runs.config import Config
from scalelong.runs.generate import Request, captions_of, evaluation_draws, generate, grid_columns
from scalelong.runs.run import REAL, Run, training_reference
from scalelong.training.display import Display
from scalelong.training.examples import Batch, Examples
from scalelong.training.own import check_metrics
from scalelong.training.probing import ProbedSplits
from scalelong.training.trackers import log_grid
from scalelong.training.trainer import Trainer, due

Share = tuple[list[npt.NDArray[np.uint8]], RangeCheck, str]  # images of one process, and why there are none


class Observers:
    """Validates all settings on construction, so that a wrong one does not show after hours of training."""

    def __init__(self, trainer: Trainer, held_out: Examples | None, run: Run, display: Display) -> None:
        self.trainer, self.held_out, self.run, self.display = trainer, held_out, run, display
        self.config, self.main = trainer.config, trainer.accelerator.is_main_process
        if self.config.monitor.every and (self.main or trainer.sharded):
            trainer.monitor = build_monitor(trainer, self.held_out, run, display)
        if self.main and (self.config.sample.n or self.config.evaluate.every):
            self._samples(trainer.copies[1] if trainer.sharded else trainer.ema.net, 1)
        self.reference: Any = None
        if self.config.evaluate.every:
            self.extractor: Any = build_extractor(self.config.evaluate.extractor)
            if isinstance(self.extractor, nn.Module):
                self.extractor.to(trainer.accelerator.device)
            with display.paused():  # computing the reference's statistics shows its own progress
                self.reference = training_reference(self.config, self.extractor)
        self.probe: ProbedSplits | None = None
        if self.config.probe.every:
            self.probe = ProbedSplits(self.config, trainer.examples, self.held_out, self.config.probe.n)
            self.probe.check(trainer.net, self.config.probe)

    def due(self, step: int, last: bool) -> bool:
        """Whether anything but the monitor runs after `step`."""
        config = self.config
        return any(
            due(step, every, last)
            for every in (config.evaluate.every, config.validate.every, config.sample.every, config.probe.every)
        )

    def after_step(self, step: int, last: bool) -> dict[str, Any]:
        """Run whatever is due after `step`. Returns the values to log."""
        trainer, config, values = self.trainer, self.config, dict[str, Any]()
        if not self.due(step, last):
            return values
        current, average = trainer.whole()
        if self.reference is not None and due(step, config.evaluate.every, last):  # every process samples its share
            request, net = replace(self._request(config.evaluate.n), **evaluation_draws(config)), average
            with self.display.paused():
                result = self.run.evaluate(request, self.reference, self.extractor, net=net, step=step, save_as="train")
            if config.evaluate.keep_best and self.main and self.run.keep_best(net, result):
                self.display.say(f"step {step}: the best so far, kept in {self.run.best_path.name}/")
            values |= {name: metric.value for name, metric in result.values.items()}
            self.display.say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        if self.held_out is not None and due(step, config.validate.every, last):
            values["val_loss"] = trainer.validation_loss(self.held_out, config.validate.n, current)
            values["val_loss_ema"] = trainer.validation_loss(self.held_out, config.validate.n, average)
        if config.sample.n and due(step, config.sample.every, last):
            values |= self._save_grid(step, average)
        # From here on the main process may work alone for longer than the others may wait in a collective of NCCL (ten
        # minutes): the next one is that of `SharedSignal`, which waits for a day.
        everywhere = self.main or getattr(trainer.own.metrics, "every_process", False)
        if everywhere and trainer.own.metrics is not None and due(step, config.validate.every, last):
            with torch.no_grad():
                values |= check_metrics(trainer.own.metrics(average, step))
        if self.main and self.probe is not None and due(step, config.probe.every, last):
            with self.display.paused():
                best = self.probe.measure(average, config.probe, seed=config.seed).best
            values |= {"probe_accuracy": best.accuracy, "probe_t": best.t, "probe_block": best.block}
            self.display.say(f"step {step}: probe accuracy {best.accuracy:.4f} ({best.block}, t = {best.t:g})")
        return values

    def close(self) -> None:
        if self.trainer.monitor is not None:
            self.trainer.monitor.remove()

    def _save_grid(self, step: int, net: nn.Module) -> dict[str, Any]:
        """Write the sample grid. Returns what to log: the share of samples that left the data's range."""
        from scalelong.data.images import save_grid

        parts = self._shares(net, self.config.sample.n)
        if failures := [failure for _, _, failure in parts if failure]:
            self.display.say(f"step {step}: no samples: {failures[0]}")
            return {}
        if not self.main:
            return {}
        images, checks = np.concatenate([batch for part, _, _ in parts for batch in part]), [part[1] for part in parts]
        check = RangeCheck(sum(c.n for c in checks), sum(c.far for c in checks), max(c.largest for c in checks))
        if check.far:
            self.display.say(f"step {step}: {check}")
        request, facts = self._request(len(images)), self.trainer.examples.facts()
        columns, captions = grid_columns(facts, request), captions_of(self.config, facts, request)
        path = self.run.samples_path / f"step-{step:08d}.png"
        save_grid(images, path, columns, captions)
        log_grid(self.trainer, path, step)
        if not (real := self.run.samples_path / REAL).exists():
            save_grid(self._real_images(len(images)), real, columns, captions)
        return {"far_share": check.share} if check.n else {}

    def _real_images(self, n: int) -> npt.NDArray[np.uint8]:
        """Return images of the data with the conditions of the samples, to look at beside them, (n, h, w, c)."""
        images = self.trainer.examples.images
        if self.config.data.text is not None:  # the prompts are captions of held-out images
            images = (self.held_out or self.trainer.examples).images
            rows = [k % len(images) for k in range(n)]
        elif self.config.data.classes and images.labels is not None:
            own = [np.flatnonzero(images.labels == label) for label in range(images.num_classes or 0)]
            turns = [(own[k % len(own)], k // len(own)) for k in range(n)]
            rows = [int(group[turn % len(group)]) if len(group) else 0 for group, turn in turns]
        else:
            rows = [k * len(images) // n for k in range(n)]  # spread, because files may be sorted
        return np.stack([images.images[row] for row in rows])

    def _shares(self, net: nn.Module, n: int) -> list[Share]:
        """Sample this process's share of `n` images. Returns those of all processes."""
        rank, world = self.trainer.accelerator.process_index, self.trainer.accelerator.num_processes
        first, last = n * rank // world, n * (rank + 1) // world
        batches, check, failure = list[npt.NDArray[np.uint8]](), RangeCheck(), ""
        try:
            if last > first:
                batches += self._samples(net, last - first, check, first)
        except ScaleLongError as error:  # sampling a young network may diverge, which must not stop its training
            failure = str(error)
        own: Share = (batches, check, failure)
        shares: list[Any] = [own] * world
        if world > 1:
            torch.distributed.all_gather_object(shares, own)
        return shares

    def _samples(
        self, net: nn.Module, n: int, check: RangeCheck | None = None, first: int = 0
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Return batches of samples. Settings are checked now, images are made when the batches are read."""
        return generate(net, self.config, self.trainer.examples.facts(), self._request(n, first), check)

    def _request(self, n: int, first: int = 0) -> Request:
        s = self.config.sample
        return Request(n=n, first=first, sampler=s.sampler, steps=s.steps, guidance=s.guidance, precision="auto")


def held_out_examples(config: Config) -> Examples | None:
    """Return the validation split, or None if the data has none and none was asked for by name."""
    try:
        return Examples(config, config.data.validation)
    except (MissingSplitError, SourceUnavailableError) as error:
        if canonical_split(config.data.validation) != "validation":
            raise
        spelled = str(error).replace("set holdout (--holdout 0.05)", "pass --holdout 0.05 (data.holdout)")
        print(f"no validation: {spelled}", file=sys.stderr)
        return None


def probe_call(trainer: Trainer, batch: Batch) -> Callable[[nn.Module], Tensor]:
    """Return a call of the network on the same noisy images every time, in the precision of the run."""
    objective, denoise = trainer.examples.objective, trainer.adapt(trainer.net)
    x_t, t = objective.network_inputs(objective.process.add_noise(batch.x_0, batch.eps, batch.t), batch.t)

    def call(net: nn.Module) -> Tensor:
        with trainer.accelerator.autocast():
            return denoise(x_t, t, y=batch.y, context=batch.context)

    return call


def build_monitor(trainer: Trainer, held_out: Examples | None, run: Run, display: Display) -> StabilityMonitor:
    """Return the monitor of a run: its probe holds held-out images, its log is stability.jsonl."""
    config = trainer.config
    samples = config.monitor.samples or probe_size(config.train.batch_size)
    batch = (held_out or trainer.examples).probe(samples).to(trainer.accelerator.device)
    return StabilityMonitor(
        trainer.net,
        probe=probe_call(trainer, batch),
        t=batch.t,
        every=config.monitor.every,
        out=run.stability_path,
        ema=trainer.ema.net,
        scaler=trainer.accelerator.scaler,
        times=(0.0, trainer.examples.process.t_max),
        log=trainer.accelerator.log if config.tracker else None,
        on_alarm=lambda alarm: display.say(f"alarm, {alarm}"),
    )
