"""What a training step costs around forward and backward, and noise in a thread against noise on the device.

    OMP_NUM_THREADS=1 python benchmarks/studies/step_overhead.py --out results/step-overhead.json

CPU time, because other programs may run. The trivial network has one parameter: its forward and backward pass are
measured on their own and subtracted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong import counter
from scalelong.models.registry import MODELS, Model
from scalelong.runs.config import override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

ROUNDS = 200


class Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def milliseconds(case: Any, rounds: int = ROUNDS) -> float:
    """Median CPU time of this thread."""
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        case()
        times.append(1000 * (time.thread_time() - started))
    return statistics.median(times)


def make_trainer(name: str, **settings: Any) -> Trainer:
    config = override(preset(name), {"train.log_every": 10**6, "train.steps": 10**6, "monitor.every": 0, **settings})
    return Trainer(config, Examples(config, "train"))


def measure() -> dict[str, Any]:
    MODELS["trivial"] = Model(lambda model, shapes: Trivial(), settings=("options",))
    trainer = make_trainer("digits-uvit", **{"model.kind": "trivial"})
    batch = trainer.batch(1)
    for _ in range(20):
        trainer.step()
    step = milliseconds(trainer.step)
    pure = milliseconds(lambda: trainer.losses(batch).mean().backward())
    found = {"step of a trivial network, ms": step, "of it forward and backward, ms": pure, "overhead, ms": step - pure}
    shape = (3, 64, 64)
    found["noise of 64 ImageNet-64 images by counter, in a thread, ms"] = milliseconds(
        lambda: counter.normal(0, 5, 1, 0, 64, shape), 10
    )
    found["noise of 64 ImageNet-64 images by torch.randn on the device, ms"] = milliseconds(
        lambda: torch.randn(64, *shape), 10
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {name: round(value, 3) for name, value in measure().items()}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        command = "OMP_NUM_THREADS=1 python benchmarks/studies/step_overhead.py"
        record = {"command": command, "torch": torch.__version__, "device": "cpu", "python": sys.version.split()[0]}
        options.out.write_text(json.dumps({**record, **result}, indent=1) + "\n")
