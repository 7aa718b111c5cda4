"""What a training step costs around forward and backward, and noise in a thread against noise on the device.

    OMP_NUM_THREADS=1 python benchmarks/studies/step_overhead.py --out results/step-overhead.json

CPU time, because other programs may run: the median, and the fastest tenth as what a quiet machine would take. The
trivial network has one parameter: its forward and backward pass are measured on their own and subtracted. The noise of
a device is Philox 4×32 in torch's operations, which run on any device; their memory traffic gives the time on a GPU.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalelong import counter
from scalelong.models.registry import MODELS, Model
from scalelong.runs.config import override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

ROUNDS = 200
BANDWIDTH = 1.5e12  # bytes/s of an A100's memory


class Trivial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Traffic(TorchDispatchMode):
    """Counts operations and the bytes that they read and write."""

    operations, bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.operations, self.bytes = (
            self.operations + 1,
            self.bytes + sum(x.numel() * x.element_size() for x in tensors),
        )
        return result


def philox(counters: torch.Tensor, key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox 4×32-10 of Random123: four 32-bit words, as int64, for every counter."""
    mask, zero = 0xFFFFFFFF, torch.zeros_like(counters)
    a, b, c, d = counters & mask, (counters >> 32) & mask, zero, zero
    for round_ in range(10):
        low, high = ((k + round_ * w) & mask for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # 64 bits, of which the sign is one
        a, b, c, d = ((q >> 32) & mask) ^ b ^ low, q & mask, ((p >> 32) & mask) ^ d ^ high, p & mask
    return [a, b, c, d]


def device_normals(count: int) -> torch.Tensor:
    """Standard normals by counter on the device: Box–Muller on Philox words."""
    words = torch.stack(philox(torch.arange(count // 4), (1, 2)))  # (4, count / 4)
    u, v = (words.float() + 0.5).mul(2.0**-32).view(2, -1)
    radius, angle = (-2 * u.log()).sqrt(), 2 * torch.pi * v
    return torch.stack([radius * angle.cos(), radius * angle.sin()])


def milliseconds(case: Any, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median and fastest tenth of the CPU time of this thread."""
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        case()
        times.append(1000 * (time.thread_time() - started))
    return statistics.median(times), sorted(times)[len(times) // 10]


def make_trainer(name: str, **settings: Any) -> Trainer:
    config = override(preset(name), {"train.log_every": 10**6, "train.steps": 10**6, "monitor.every": 0, **settings})
    return Trainer(config, Examples(config, "train"))


def measure() -> dict[str, Any]:
    MODELS["trivial"] = Model(lambda model, shapes: Trivial(), settings=("options",))
    trainer = make_trainer("digits-uvit", **{"model.kind": "trivial"})
    batch = trainer.batch(1)
    for _ in range(20):
        trainer.step()
    (step, fast), (pure, quick) = (
        milliseconds(case) for case in (trainer.step, lambda: trainer.losses(batch).mean().backward())
    )
    found = {"step of a trivial network, ms": step, "of it forward and backward, ms": pure, "overhead, ms": step - pure}
    found["overhead in the fastest tenth, ms"] = fast - quick
    tiny = make_trainer("cifar10-tiny")
    tiny.step()
    found["step of cifar10-tiny, ms"] = milliseconds(tiny.step, 5)[0]
    found["overhead / step of cifar10-tiny"] = (step - pure) / found["step of cifar10-tiny, ms"]
    return found | noise()


def noise(images: int = 64) -> dict[str, float]:
    """Noise of `images` ImageNet-64 images: by counter in a thread, and by counter on a device."""
    shape, count = (3, 64, 64), images * 3 * 64 * 64
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's known answer for counter 0, key 0
    assert [int(word) for word in philox(torch.zeros(1, dtype=torch.int64), (0, 0))] == expected
    values = device_normals(count)
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    with Traffic() as traffic:
        device_normals(count)
    what = f"noise of {images} ImageNet-64 images"
    return {
        f"{what} by counter, in a thread, ms": milliseconds(lambda: counter.normal(0, 5, 1, 0, images, shape), 10)[0],
        f"{what} by counter, torch's operations on a CPU, ms": milliseconds(lambda: device_normals(count), 5)[0],
        f"{what} by torch.randn on a CPU, ms": milliseconds(lambda: torch.randn(images, *shape), 10)[0],
        "operations of the counter on a device": traffic.operations,
        "bytes that they read and write": traffic.bytes,
        "their time at an A100's bandwidth, ms": 1000 * traffic.bytes / BANDWIDTH,
        "bytes to copy instead": 4 * count,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {name: round(value, 5) for name, value in measure().items()}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        command = "OMP_NUM_THREADS=1 python benchmarks/studies/step_overhead.py"
        record = {"command": command, "torch": torch.__version__, "device": "cpu", "python": sys.version.split()[0]}
        options.out.write_text(json.dumps({**record, **result}, indent=1) + "\n")
