"""How long training steps take on this machine: measured once per machine and torch, kept in the cache.

`scalelong doctor` measures and `scalelong presets` reads. A preset that trains on a CPU is timed itself, with a smaller
batch where a step would take long; larger ones are extrapolated from the FLOP/s of the measured ones of their kind.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scalelong.files import cache_dir, read_json, write_text
from scalelong.models.registry import Shapes
from scalelong.runs.config import Config
from scalelong.training.presets import PRESETS, expected_shapes, sizes

FLOP = 8e9  # per timed step, at most: a fraction of a second on one core
ROUNDS = 3  # timed steps of each preset; the fastest counts
Progress = Callable[[Iterable[str], str], Iterable[str]]  # such as scalelong.progress.track


@dataclass(frozen=True)
class Speed:
    """Seconds per training step of measured presets, and FLOP/s of the largest of each kind of network."""

    machine: str
    threads: int
    torch: str
    device: str
    measured: str  # when
    seconds: dict[str, float]
    flops: dict[str, float]  # by model.kind

    def minutes(self, name: str) -> float | None:
        """Return the minutes that all steps of a preset take, or None if no network of its kind was measured."""
        size, kind = sizes()[name], PRESETS[name].config.model.kind
        if name in self.seconds:
            return self.seconds[name] * size["steps"] / 60
        return size["flop_per_step"] * size["steps"] / self.flops[kind] / 60 if kind in self.flops else None


def timed() -> list[str]:
    """Return the presets that are timed: those for a CPU."""
    return [name for name, preset in PRESETS.items() if preset.size == "cpu"]


def cpu_name() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def stored_speed() -> Speed | None:
    """Return what was measured on this machine with this torch, without importing torch."""
    from importlib import metadata

    values = read_json(_path()) or {}
    if set(values) != {field.name for field in fields(Speed)}:
        return None
    current = (cpu_name(), metadata.version("torch"))
    return Speed(**values) if (values["machine"], values["torch"]) == current else None


def measure_speed(device: Any, progress: Progress) -> Speed:
    """Time training steps of the small presets on `device` (some ten seconds) and store the result."""
    from importlib import metadata

    import torch

    known = sizes()
    seconds, flops, largest = dict[str, float](), dict[str, float](), dict[str, float]()
    for name in progress(timed(), "timing training steps"):
        size, kind = known[name], PRESETS[name].config.model.kind
        batch = max(1, min(size["batch_size"], int(FLOP / (size["flop_per_step"] / size["batch_size"]))))
        config = PRESETS[name].config
        seconds[name] = step_seconds(config, expected_shapes(config), batch, device) * size["batch_size"] / batch
        if size["flop_per_step"] > largest.get(kind, 0.0):
            largest[kind], flops[kind] = size["flop_per_step"], size["flop_per_step"] / seconds[name]
    when, version = time.strftime("%Y-%m-%d"), metadata.version("torch")
    speed = Speed(cpu_name(), torch.get_num_threads(), version, str(device), when, seconds, flops)
    write_text(_path(), json.dumps(asdict(speed), indent=1) + "\n")
    return speed


def step_seconds(config: Config, shapes: Shapes, batch: int, device: Any) -> float:
    """Return the time of a step: forward, backward, clipping, AdamW and EMA on random images."""
    import torch

    from scalelong.models.registry import get_model
    from scalelong.runs.run import build_network

    net = build_network(config, shapes).to(device).train()
    denoise, parameters = get_model(config.model.kind).adapt(net), list(net.parameters())
    averages, optimizer = [p.detach().clone() for p in parameters], torch.optim.AdamW(parameters, lr=1e-4)
    x = torch.randn(batch, shapes.channels, shapes.size, shapes.size, device=device)
    t = torch.linspace(1, 999, batch, device=device)
    y = torch.zeros(batch, dtype=torch.long, device=device) if shapes.label_rows else None
    context = None
    if shapes.text_width:
        context = torch.randn(batch, shapes.text_tokens or 0, shapes.text_width, device=device)
    # On a CPU the process's own time counts, so that other programs do not: what an idle machine would take.
    on_cpu, threads = torch.device(device).type == "cpu", torch.get_num_threads()
    clock = (lambda: time.process_time() / threads) if on_cpu else time.perf_counter
    best = float("inf")
    for _ in range(1 + ROUNDS):  # the first warms up; it counts too if it is the fastest
        started = clock()
        denoise(x, t, y=y, context=context).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 1e-3)
        float(averages[0].flatten()[0])  # waits for the device
        best = min(best, clock() - started)
    return best


def _path() -> Path:
    return cache_dir() / "speed.json"
