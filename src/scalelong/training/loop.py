"""Train a config in a run folder. The same call resumes an interrupted run and returns at once for a finished one."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from scalelong.errors import RunError
from scalelong.files import check_target, read_json
from scalelong.runs.config import Config, differences, kept_kappa
from scalelong.runs.logs import JsonLines
from scalelong.runs.resources import recorded
from scalelong.runs.run import STEP, Run
from scalelong.skips import scaling_of
from scalelong.training import checkpoint
from scalelong.training.checkpoint import Background
from scalelong.training.display import Display
from scalelong.training.examples import Examples, check_classes
from scalelong.training.failures import explained
from scalelong.training.observers import Observers, held_out_examples
from scalelong.training.own import LossFn, MetricsFn, OptimizerFn, Own, changes
from scalelong.training.parallel import SharedSignal, choose_precision, finish
from scalelong.training.schedule import same_past
from scalelong.training.trackers import start_tracker
from scalelong.training.trainer import Trainer, due

FEW = 10  # images; training on so few is worth a remark


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended."""

    run: Run
    step: int
    finished: bool
    signal: int | None = None  # the signal that interrupted it


def train(
    config: Config,
    out: Path | str,
    *,
    loss: LossFn | None = None,
    optimizer: OptimizerFn | None = None,
    metrics: MetricsFn | None = None,
    quiet: bool = False,
) -> Result:
    """Train `config` in the folder `out`, or resume the run in it.

    Args:
        config: The settings: `preset(…)`, changed by `override(…)`.
        out: The run folder. A resumed run needs the same settings, loss and optimizer.
        loss: `loss(eps_fn, process, batch)` returns one value per sample, (B,), instead of the paper's loss.
        optimizer: `optimizer(net)` returns a torch optimizer instead of AdamW.
        metrics: `metrics(net, step)` returns numbers to log at every validation, from the EMA network.
        quiet: Print no progress.

    Returns:
        What the run ended with. docs/your-own-script.md has an example of each argument.

    Examples:
        >>> from scalelong.training import override, preset, train
        >>> small = {"scaling": "cs:0.7", "train.steps": 2, "train.batch_size": 8, "model.channels": "8,8"}
        >>> result = train(override(preset("digits"), small | {"sample.every": 0}), "runs/small", quiet=True)
        >>> result.step
        2
    """
    run = Run(out)
    check_target(run.folder, folder=True)
    if config.train.precision == "auto":  # a resumed run keeps what it started with, on any machine
        stored = run.config.train.precision if run.exists else "auto"
        config = replace(config, train=replace(config.train, precision=choose_precision(stored)))
    config = kept_kappa(config, run.config) if run.exists else config
    with explained(config, run):
        # Data is ready before the processes join: one prepares it, the others wait for files, not in a collective.
        examples, held_out = Examples(config, config.data.split), held_out_examples(config)
        check_classes(examples, held_out)
        if config.scaling.unresolved:
            from scalelong.training.auto import resolve_kappa

            config, chosen = resolve_kappa(config, examples)
            if not quiet and os.environ.get("RANK", "0") == "0":
                print(f"scaling auto: kappa = {chosen.kappa:g}: {chosen.reason}", file=sys.stderr)
        trainer = Trainer(config, examples, Own(loss, optimizer, metrics))
        main = trainer.accelerator.is_main_process
        with run.locked() if main else nullcontext():
            interrupted_by = _train(trainer, held_out, run, quiet=quiet or not main)
    finish(trainer.accelerator)
    return Result(run, trainer.progress.step, finished=interrupted_by is None, signal=interrupted_by)


def _train(trainer: Trainer, held_out: Examples | None, run: Run, quiet: bool) -> int | None:
    """Resume, then train to the end or to a signal, which is returned."""
    config, messages = trainer.config, _resume(trainer, run)
    start = trainer.progress.step
    with Display(run.name, config.train.steps, start, config.train.batch_size, quiet=quiet) as display:
        for message in [*messages, *_notices(trainer)]:
            display.say(message)
        if start >= config.train.steps:
            display.say(f"{run.folder} is finished: {start} of {config.train.steps} steps")
            return None
        if start:
            display.say(f"{run.folder}: resuming after step {start}")
        if config.tracker is not None:
            start_tracker(trainer, run, config.tracker)
        return _loop(trainer, Observers(trainer, held_out, run, display), run, display)


def _loop(trainer: Trainer, observers: Observers, run: Run, display: Display) -> int | None:
    config, main = trainer.config, trainer.accelerator.is_main_process
    log, shown = JsonLines(run.metrics_path), None  # `shown`: the last step that was logged
    writer = Background(run, config.checkpoint.keep, trainer.whole()[1])
    with _signals() as received, recorded(run) if main else nullcontext(), writer:
        stops = SharedSignal(trainer.accelerator.num_processes)
        try:
            while trainer.progress.step < config.train.steps:
                outcome = trainer.step()
                step, last = trainer.progress.step, trainer.progress.step == config.train.steps
                entry: dict[str, Any] = {}
                if due(step, config.train.log_every, last):  # in between the device is not waited for
                    shown = outcome
                    entry = {"loss": outcome.loss, "lr": outcome.lr, "grad_norm": outcome.grad_norm}
                    entry |= {"images": trainer.progress.images, "seconds": round(trainer.progress.seconds, 3)}
                    entry |= {"skipped": True} if outcome.skipped else {}
                    if trainer.distillation_loss is not None:
                        entry["distillation_loss"] = trainer.distillation_loss.item()
                display.step(step, shown)
                entry |= observers.after_step(step, last)
                if entry and main:
                    log.write({"step": step, **entry})
                    if config.tracker:
                        numbers = {k: v for k, v in entry.items() if isinstance(v, (int, float))}
                        trainer.accelerator.log(numbers, step=step)
                stop = stops.after_step(received, wait=observers.due(step, last))
                if due(step, config.checkpoint.every, last) or stop is not None:
                    log.sync()
                    state = trainer.state() if main or trainer.sharded else None
                    if main and state is not None:
                        writer.save(state)
                    if last or stop is not None:
                        writer.wait()
                        stops.wait()
                if stop is not None and not last:
                    name = signal.Signals(stop).name
                    display.say(f"{name}: wrote a checkpoint after step {step}; the same command resumes")
                    return stop
        finally:
            log.close()
            observers.close()
    return None


def _resume(trainer: Trainer, run: Run) -> list[str]:
    """Restore the newest intact checkpoint if this is the same run. Returns messages for the user."""
    config, facts, messages = trainer.config, _facts(trainer), list[str]()
    if run.exists:
        changed = differences(run.config, config)
        if run.record.get("data", {}).get("fingerprint") != facts["data"]["fingerprint"]:
            changed.append("the data itself (another fingerprint)")
        else:  # the same data, wherever it is now
            changed = [change for change in changed if not change.startswith("data.name:")]
        changed += changes(run.record.get("own"), trainer.own) + _changed_split(run, trainer)
        if changed:
            settings = "; ".join(changed)
            raise RunError(f"{run.folder} was started with other settings: {settings}. Use the same, or another --out")
        state, messages = checkpoint.newest(run.checkpoints_path)
        if state is not None:
            before, updates = run.config.train, state.progress.updates
            if not same_past(before, config.train, updates):
                raise RunError(
                    f"{run.folder} has a {before.schedule} schedule over train.steps={before.steps}: with "
                    f"train.steps={config.train.steps} its {updates} updates would have had other learning rates. "
                    f"Use --steps {before.steps}, or another --out"
                )
            trainer.restore(state)
    average = trainer.whole()[1]
    if trainer.accelerator.is_main_process:
        step, every = trainer.progress.step, max(1, config.train.log_every)
        logged = JsonLines(run.metrics_path).keep_until(step)
        JsonLines(run.stability_path).keep_until(step)
        if step - logged >= every and step >= every:
            messages.append(f"note: {run.metrics_path.name} ends at step {logged}, the checkpoint is of step {step}")
        run.write_record({"config": config.to_dict(), **facts})
        stored = read_json(run.model_path / STEP) or {}
        if step and stored.get("step") != step:  # the process was killed between writing checkpoint and model/
            run.save_model(average, step)
    trainer.accelerator.wait_for_everyone()
    return messages


def _changed_split(run: Run, trainer: Trainer) -> list[str]:
    """Return the change of train.accumulate if a step depends on it: through dropout masks or distillation.

    Masks are drawn for each part of a batch, so that fewer processes with more parts have the same ones. Distillation
    takes the first part of every process.
    """
    before, after = run.config.train.accumulate, trainer.config.train.accumulate
    parts = run.record.get("processes", 1) * before, trainer.accelerator.num_processes * after
    if before != after and (trainer.distillation is not None or (trainer.has_dropout and parts[0] != parts[1])):
        reader = "dropout" if trainer.distillation is None else "distillation"
        return [f"train.accumulate: {before} → {after} ({reader} depends on the parts of a batch)"]
    return []


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What config.json contains beside the config: shapes, data, sizes, versions."""
    packages = ("scalelong", "torch", "diffusers", "accelerate", "safetensors", "numpy")
    images = trainer.examples.images
    return {
        **asdict(trainer.examples.facts()),
        "data": {"name": images.name, "split": images.split, "n": len(images), "fingerprint": images.fingerprint},
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
        "device": str(trainer.accelerator.device),
        "processes": trainer.accelerator.num_processes,
        "versions": {"python": sys.version.split()[0], **{p: metadata.version(p) for p in packages}},
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **({"own": own} if (own := trainer.own.record()) else {}),
    }


def _notices(trainer: Trainer) -> list[str]:
    """Information about the scaling and the precision. (`apply` has already raised the warnings.)"""
    scaler, notices = scaling_of(trainer.net), list[str]()
    if scaler is not None and scaler.sites:
        found = scaler.spec.notices(len(scaler.sites))
        notices += [f"note: {notice}" for notice in found if notice.level == "info"]
    if skipped := trainer.examples.images.manifest["skipped"]:
        notices.append(f"note: {len(skipped)} bad files are left out; the first: {' '.join(skipped[0])}")
    if (count := len(trainer.examples)) < FEW:
        images = "1 image" if count == 1 else f"{count} images"
        notices.append(f"note: the training data has {images}; samples will be copies, not new images")
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and trainer.accelerator.num_processes == 1:
        notices.append(
            "note: accelerate launch --cpu started one process; for N processes on CPUs use "
            "torchrun --nproc-per-node=N -m scalelong train …"
        )
    on_cpu = trainer.accelerator.device.type == "cpu"
    if trainer.config.train.precision == "bf16" and on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        notices.append("note: this CPU has no bf16 instructions; bf16 is several times slower than fp32 here")
    return notices


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, to be handled after the step. A second SIGINT interrupts immediately."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            previous[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread, which handles signals itself
            break
    try:
        yield received
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
