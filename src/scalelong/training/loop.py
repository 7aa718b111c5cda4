"""Train a config in a run folder. The same call again goes on where it stopped; a finished run returns at once."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scalelong.errors import RunError, ScaleLongError, require
from scalelong.files import check_target
from scalelong.runs.config import Config, differences, flatten
from scalelong.runs.logs import JsonLines
from scalelong.runs.run import Run
from scalelong.skips.application import sites_of
from scalelong.training import checkpoint
from scalelong.training.display import Display
from scalelong.training.examples import Examples
from scalelong.training.failures import in_sentences
from scalelong.training.trainer import Outcome, Trainer


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Run
    step: int
    finished: bool
    signal: int | None = None  # the signal that ended it early


def train(config: Config, out: Path | str, *, quiet: bool = False) -> Result:
    """Train `config` in the folder `out`, or go on with the run that is there."""
    run = Run(out)
    check_target(run.folder, folder=True)
    with in_sentences(config, run.folder, run.checkpoints_path):
        trainer = Trainer(config, Examples(config, config.data.split))
        main = trainer.accelerator.is_main_process
        with run.locked() if main else nullcontext():
            ended = _train(trainer, run, quiet=quiet or not main)
    trainer.accelerator.end_training()
    return Result(run, trainer.progress.step, finished=ended is None, signal=ended)


def _train(trainer: Trainer, run: Run, quiet: bool) -> int | None:
    """Resume, and go on to the end or to a signal, which is returned."""
    config = trainer.config
    notes = _resume(trainer, run, config)
    start = trainer.progress.step
    with Display(run.name, config.train.steps, start, config.train.batch_size, quiet=quiet) as display:
        for note in [*notes, *_notices(trainer)]:
            display.say(note)
        if start >= config.train.steps:
            display.say(f"{run.folder} is finished: {start} of {config.train.steps} steps")
            return None
        if start:
            display.say(f"{run.folder}: going on after step {start}")
        if config.tracker is not None:
            _start_tracker(trainer, run, config.tracker)
        return _loop(trainer, run, display)


def _notices(trainer: Trainer) -> list[str]:
    """What is worth knowing and no reason to warn (`apply` has warned of what is)."""
    notes, spec = [], trainer.config.scaling
    if not spec.is_identity and spec.acts_on == "skips":
        n = len(sites_of(trainer.net)[0])
        notes += [f"note: {notice}" for notice in spec.notices(n) if notice.level == "info"]
    on_cpu = trainer.accelerator.device.type == "cpu"
    if trainer.config.train.precision == "bf16" and on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        notes.append("note: this CPU has no bf16 instructions, so bf16 is several times slower than fp32 here")
    return notes


def _start_tracker(trainer: Trainer, run: Run, tracker: str) -> None:
    """TensorBoard files in the run folder, or a W&B run of its name."""
    require(tracker, extra=tracker, purpose=f"tracker={tracker}")
    from accelerate.tracking import filter_trackers

    trainer.accelerator.project_configuration.set_directories(str(run.folder))
    trainer.accelerator.log_with = filter_trackers(tracker, trainer.accelerator.logging_dir)
    settings = {
        k: v if isinstance(v, (int, float, str, bool)) else str(v) for k, v in flatten(trainer.config.to_dict()).items()
    }
    trainer.accelerator.init_trackers(run.name if tracker == "tensorboard" else "scalelong", config=settings)


def _loop(trainer: Trainer, run: Run, display: Display) -> int | None:
    """Steps until the end or a signal, which is returned."""
    config, main = trainer.config, trainer.accelerator.is_main_process
    log = JsonLines(run.metrics_path)
    observers = _Observers(trainer, run, display)
    with _signals() as received:
        try:
            while trainer.progress.step < config.train.steps:
                outcome = trainer.step()
                step, last = trainer.progress.step, trainer.progress.step == config.train.steps
                display.step(step, outcome)
                entry = _entry(trainer, outcome) if _due(step, config.train.log_every, last) else {}
                entry |= observers.look(step, last)
                if entry and main:
                    log.write({"step": step, **entry})
                    if config.tracker:
                        trainer.accelerator.log(
                            {k: v for k, v in entry.items() if isinstance(v, (int, float))}, step=step
                        )
                stopped = _agreed_signal(trainer, received)
                if _due(step, config.checkpoint.every, last) or stopped is not None:
                    log.sync()
                    _save(trainer, run)
                if stopped is not None and not last:
                    name = signal.Signals(stopped).name
                    display.say(f"{name}: checkpoint written after step {step}; the same command goes on from there")
                    return stopped
        finally:
            log.close()
            observers.close()
    return None


def _entry(trainer: Trainer, outcome: Outcome) -> dict[str, Any]:
    p = trainer.progress
    entry: dict[str, Any] = {"loss": outcome.loss, "lr": outcome.lr, "grad_norm": outcome.grad_norm}
    entry |= {"images": p.images, "seconds": round(p.seconds, 3)}
    return {**entry, "skipped": True} if outcome.skipped else entry


class _Observers:
    """Validation, sample grids and what else looks at a run on the way. None of them changes a loss."""

    def __init__(self, trainer: Trainer, run: Run, display: Display) -> None:
        self.trainer, self.run, self.display = trainer, run, display
        config = trainer.config
        self.held_out = _validation(config) if trainer.accelerator.is_main_process else None
        if config.monitor.every and trainer.accelerator.is_main_process:
            from scalelong.training.watching import watch

            trainer.watch = watch(trainer, self.held_out, run, display)

        if config.sample.n and trainer.accelerator.is_main_process:
            self._grid(1)  # what is wrong with the settings of sampling is said now, not after hours of training
        self.evaluation = None
        if config.evaluate.every:
            from scalelong.runs.evaluate import TrainingEvaluation

            with display.paused():  # the reference's statistics take a while the first time
                self.evaluation = TrainingEvaluation(config, run.folder, trainer.accelerator.device)

    def look(self, step: int, last: bool) -> dict[str, Any]:
        """What was seen after `step`, for the log."""
        config, seen = self.trainer.config, dict[str, Any]()
        if self.evaluation is not None and self.evaluation.due(step, last):  # every process samples its share
            with self.display.paused():
                seen |= self.evaluation(self.trainer.ema.net, self.trainer.examples.facts(), step)
            self.display.say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in seen.items()))
        if not self.trainer.accelerator.is_main_process:
            return seen
        if self.held_out is not None and _due(step, config.validate.every, last):
            seen["val_loss"] = self.trainer.validation_loss(self.held_out, config.validate.n)
            seen["val_loss_ema"] = self.trainer.validation_loss(self.held_out, config.validate.n, self.trainer.ema.net)
        if config.sample.n and _due(step, config.sample.every, last):
            self._sample(step)
        return seen

    def close(self) -> None:
        if self.trainer.watch is not None:
            self.trainer.watch.remove()

    def _sample(self, step: int) -> None:
        from scalelong.data.images import save_grid
        from scalelong.runs.generate import Request, grid_columns

        try:
            images = np.concatenate(list(self._grid(self.trainer.config.sample.n)))
        except ScaleLongError as error:  # a young network may diverge in sampling: that must not end its training
            self.display.say(f"step {step}: no samples: {error}")
            return
        columns = grid_columns(self.trainer.examples.facts(), Request(n=len(images)))
        save_grid(images, self.run.samples_path / f"step-{step:08d}.png", columns)

    def _grid(self, n: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Batches of samples. Settings are checked here, before the first batch is asked for."""
        from scalelong.runs.generate import Request, generate

        trainer, s = self.trainer, self.trainer.config.sample
        request = Request(n=n, sampler=s.sampler, steps=s.steps, guidance=s.guidance)
        return generate(trainer.ema.net, trainer.config, trainer.examples.facts(), request)


def _validation(config: Config) -> Examples | None:
    """The held-out split, where the data has one."""
    try:
        return Examples(config, config.data.validation)
    except ScaleLongError as error:
        if config.validate.every:
            print(f"no validation: {error}", file=sys.stderr)
        return None


def _resume(trainer: Trainer, run: Run, config: Config) -> list[str]:
    """Take up the newest whole checkpoint, after making sure that it is the same run."""
    facts = _facts(trainer)
    main, notes = trainer.accelerator.is_main_process, list[str]()
    if run.exists:
        changed = differences(run.config, config)
        if run.record.get("data", {}).get("fingerprint") != facts["data"]["fingerprint"]:
            changed.append("the data itself (its fingerprint differs)")
        if changed:
            raise ScaleLongError(
                f"{run.folder} was started with other settings: {'; '.join(changed)}. "
                "Give the same ones, or another --out"
            )
        state, notes = checkpoint.newest(run.checkpoints_path)
        if state is not None:
            trainer.restore(state)
    if main:
        step, every = trainer.progress.step, max(1, config.train.log_every)
        logged = JsonLines(run.metrics_path).keep_until(step)
        JsonLines(run.stability_path).keep_until(step)
        if step - logged >= every and step >= every:
            notes.append(f"note: {run.metrics_path.name} ends at step {logged}, the checkpoint is of step {step}")
        run.write_record({"config": config.to_dict(), **facts})
        if trainer.progress.step and _model_step(run) != trainer.progress.step:
            run.save_model(trainer.ema.net, trainer.progress.step)  # a kill came between checkpoint and model/
    trainer.accelerator.wait_for_everyone()
    return notes


def _model_step(run: Run) -> int | None:
    try:
        return run.step
    except RunError:
        return None


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What config.json says beside the config: versions, data, sizes."""
    packages = ("scalelong", "torch", "diffusers", "accelerate", "safetensors", "numpy")
    images = trainer.examples.images
    return {
        **trainer.examples.facts().to_dict(),
        "data": {"name": images.name, "split": images.split, "n": len(images), "fingerprint": images.fingerprint},
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
        "device": str(trainer.accelerator.device),
        "processes": trainer.accelerator.num_processes,
        "versions": {"python": sys.version.split()[0], **{p: metadata.version(p) for p in packages}},
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _save(trainer: Trainer, run: Run) -> None:
    if trainer.accelerator.is_main_process:
        run.check_exists()
        checkpoint.save(run.checkpoints_path, trainer.state(), trainer.config.checkpoint.keep)
        run.save_model(trainer.ema.net, trainer.progress.step)
    trainer.accelerator.wait_for_everyone()


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted and acted on after the step; a second SIGINT ends at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, note)
        except ValueError:  # not the main thread: somebody else handles signals
            break
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agreed_signal(trainer: Trainer, received: list[int]) -> int | None:
    """The signal that any process got, so that all stop after the same step."""
    number = received[0] if received else 0
    if trainer.accelerator.num_processes > 1:
        noted = torch.tensor([number], device=trainer.accelerator.device)
        number = int(trainer.accelerator.gather(noted).max().item())
    return number or None
