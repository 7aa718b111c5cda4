"""`scalelong doctor --gpu`: does training work on this GPU as it does on the CPU, and does anything wait?

Every check is measured. Without a GPU the same checks run on the CPU, and the report says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong.runs.config import Config, override
from scalelong.runs.logs import read_columns
from scalelong.training.examples import Examples
from scalelong.training.parallel import make_accelerator
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

STEPS, CLOSE = 10, 1e-3  # compared losses, and how far apart they may be in float32
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}  # leaves the CPU; the second hides MPS
CLASSES = "digits-class"  # a table of noise levels and dropped labels, which digits-uvit does not have
READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.nonzero", "aten.equal.")


class Waits(TorchDispatchMode):
    """Counts what makes the host wait: reading a number of a tensor, and copies from a device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), str(function)
        if name.startswith(READS):
            self.found.append(name)
        if name.startswith(("aten._to_copy", "aten.copy_")):
            source = args[1] if name.startswith("aten.copy_") else args[0]
            if source.device.type != "cpu" and result.device.type == "cpu":
                self.found.append(name)
        return result


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    found: str
    passed: bool | None  # None: information


def run_checks() -> list[Check]:
    """Run all checks: about a minute on a CPU, less on a GPU."""
    steps = {"losses": _losses, "waits": _waits, "graphs": _graphs, "parts": _parts}
    checks = [Check("device", _device(), None)]
    for name, step in steps.items():
        try:
            checks += step()
        except Exception as error:  # the report is most useful where something fails
            checks.append(Check(name, f"{type(error).__name__}: {str(error)[:300]}", False))
    return checks


def report(checks: list[Check]) -> str:
    """Return the checks as Markdown, to paste into an issue."""
    packages = ("scalelong", "torch", "accelerate", "diffusers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    words = {True: "ok", False: "FAILED", None: ""}
    rows = [f"| {check.name} | {check.found} | {words[check.passed]} |" for check in checks]
    return "\n".join([f"scalelong doctor --gpu: {versions}", "", "| check | found | |", "|---|---|---|", *rows])


def _device() -> str:
    kind = make_accelerator(_config().train).device.type
    if kind != "cuda":
        return f"these checks ran on {'the CPU' if kind == 'cpu' else kind}, not on a CUDA GPU"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _config(name: str = "digits-uvit", **settings: Any) -> Config:
    values = {"train.steps": 40, "train.log_every": 10, "sample.n": 0, "validate.n": 16, "monitor.every": 0}
    return override(preset(name), {**values, **{k.replace("__", "."): v for k, v in settings.items()}})


def _trainer(name: str = "digits-uvit", **settings: Any) -> Trainer:
    config = _config(name, **settings)
    return Trainer(config, Examples(config, "train"))


def _losses() -> list[Check]:
    """Ten losses in float32 here and on the CPU, each in a process of its own."""
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for name, hidden in (("here", {}), ("cpu", HIDDEN)):
            out = Path(folder, name)
            options = [f"--steps={STEPS}", "--set=train.log_every=1", "--set=train.precision=fp32", "--set=sample.n=0"]
            command = [sys.executable, "-m", "scalelong", "train", "digits-uvit", "--out", str(out), *options, "-q"]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **hidden})
            losses.append(read_columns(out / "metrics.jsonl")["loss"].values)
    apart = float(abs(losses[0] - losses[1]).max())
    return [Check(f"{STEPS} losses against the CPU's", f"at most {apart:.2g} apart (limit {CLOSE:g})", apart <= CLOSE)]


def _waits() -> list[Check]:
    """Operations that wait in steps 2 … 9, of which none is logged."""
    checks = []
    cases: dict[str, dict[str, Any]] = {
        "": {}, " with train.nonfinite=skip": {"train__nonfinite": "skip"}, f" of {CLASSES}": {"name": CLASSES},
    }  # fmt: skip
    for name, settings in cases.items():
        trainer = _trainer(**settings)
        trainer.step()
        with Waits() as waits:
            for _ in range(8):
                trainer.step()
        title = f"waits for the device in 8 steps between logs{name}"
        expected = not trainer.update.fused  # MPS: the host decides about every step
        checks.append(Check(title, ", ".join(sorted(set(waits.found))) or "0", None if expected else not waits.found))
    if torch.cuda.is_available():
        for name, text in (("digits-uvit", ""), (CLASSES, f" of {CLASSES}")):
            checks.append(Check(f"synchronisations that CUDA reports in 8 steps{text}", *_cuda_waits(name)))
    return checks


def _cuda_waits(name: str) -> tuple[str, bool]:
    trainer = _trainer(name)
    trainer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(8):
                trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return f"{len(found)}" + (f", the first at {found[0].filename}:{found[0].lineno}" if found else ""), not found


def _graphs() -> list[Check]:
    """Graphs that torch.compile makes in the first step, and in the nine after it."""
    if not torch.cuda.is_available():  # on a CPU it needs a C++ compiler that fits torch
        return [Check("train.compile=blocks", "not checked without a GPU", None)]
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    trainer = _trainer(train__compile="blocks")
    trainer.step()
    first = counters["stats"]["unique_graphs"]
    for _ in range(9):
        trainer.step()
    later, breaks = counters["stats"]["unique_graphs"] - first, sum(counters["graph_break"].values())
    found = f"{first} graphs in step 1, {later} in the next 9, {breaks} breaks"
    return [Check("train.compile=blocks", found, later == 0 and breaks == 0 and first > 0)]


def _parts() -> list[Check]:
    """Milliseconds of a step and of its parts. The batch is prepared in a thread, beside the step before."""
    trainer = _trainer(train__steps=400, train__log_every=400)
    device, numbers = trainer.accelerator.device, iter(range(1000, 2000))
    batch = trainer.batch(1)

    def forward_backward() -> None:
        trainer.accelerator.backward(trainer.losses(batch).mean())

    cases: dict[str, Any] = {
        "batch, in the thread": lambda: trainer._parts(next(numbers)),
        "copy to the device": lambda: trainer._parts(1)[0].to(device),
        "forward and backward": forward_backward,
        "whole step": trainer.step,
    }
    return [Check(f"time of: {name}", f"{_milliseconds(case, device):.2f} ms", None) for name, case in cases.items()]


def _milliseconds(case: Any, device: torch.device, rounds: int = 20) -> float:
    def wait() -> None:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize()

    for _ in range(3):
        case()
    wait()
    started = time.perf_counter()
    for _ in range(rounds):
        case()
    wait()
    return 1000 * (time.perf_counter() - started) / rounds
