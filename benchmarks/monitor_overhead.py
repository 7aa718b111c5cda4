"""What watching costs a training loop, in processor time.

    python benchmarks/monitor_overhead.py [digits] [unet] [--periods 60] [--every 10] [--json FILE]

One network is trained in one process; the monitor is switched off and on again, a period of 2·`every` steps each
(three looks: every second one looks at the step before it too). Of each pair of periods

    looks           what the steps that are looked at, and those right after them, take more than the steps around
                    them, over a whole period: 1 + extra/period. Neighbours in time: the finest measure
    between looks   the other steps of the watched period to the same steps of the unwatched one
    all steps       the whole watched period to the whole unwatched one. Says everything, and is the noisiest

Medians over the pairs with the quartiles, and the standard error of the median by resampling them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import scalelong
from scalelong.models.denoiser import Denoiser
from scalelong.monitor.monitor import StabilityMonitor
from scalelong.runs.config import override
from scalelong.runs.run import Run
from scalelong.training.display import Display
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer
from scalelong.training.watching import watch

TARGET = 1.03
Step = Callable[[], object]


def digits(folder: Path, every: int) -> tuple[Step, StabilityMonitor]:
    """The digits preset's own training step (U-ViT, width 64, 6 skips, batch 32, AdamW, EMA)."""
    config = override(preset("digits"), {"monitor.every": every})
    trainer = Trainer(config, Examples(config, "train"))
    trainer.watch = watch(trainer, None, Run(folder), Display("", 1, 0, 1, quiet=True))
    return trainer.step, trainer.watch


def unet(folder: Path, every: int) -> tuple[Step, StabilityMonitor]:
    """A plain loop on a small diffusers U-Net (12 skips, 32×32, batch 16)."""
    torch.manual_seed(0)
    net = scalelong.build_unet("cifar10", block_out_channels=(32, 64, 64, 64), attention_head_dim=8)
    denoise, optimizer = Denoiser(net), torch.optim.AdamW(net.parameters(), 1e-4)
    x, t, eps = torch.randn(16, 3, 32, 32), torch.arange(16) * 60.0, torch.randn(16, 3, 32, 32)
    monitor = StabilityMonitor(net, (x[:8], t[:8]), every=every, out=folder / "stability.jsonl")
    numbers = itertools.count(1)

    def step() -> None:
        optimizer.zero_grad()
        with monitor.step(next(numbers)):
            losses = (denoise(x, t) - eps).square().flatten(1).mean(1)
            losses.mean().backward()
            monitor.note(loss=losses, t=t)
        monitor.note(grad_norm=torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()

    return step, monitor


LOOPS = {"digits": digits, "unet": unet}


def measure(name: str, periods: int, every: int) -> dict[str, dict[str, Any]]:
    length = 2 * every
    looked = {every - 1, length - 2, length - 1}  # of the steps 0 … length - 1 of a period
    touched = looked | {(k + 1) % length for k in looked}
    between = [k for k in range(length) if k not in touched]
    ratios: dict[str, list[float]] = {"looks": [], "between looks": [], "all steps": []}
    with tempfile.TemporaryDirectory() as folder:
        step, monitor = LOOPS[name](Path(folder), every)
        for k in range(periods + 1):
            seconds = {}
            for watched in (True, False):
                monitor.every = every if watched else 0
                seconds[watched] = [_timed(step) for _ in range(length)]
            if k == 0:  # warms up
                continue
            with_it, without = seconds[True], seconds[False]
            usual = statistics.fmean(with_it[j] for j in between)
            # the step after the last look is the first of the unwatched period
            extra = sum(with_it[j] for j in touched - {0}) + without[0] - len(touched) * usual
            ratios["looks"].append(1 + extra / (length * usual))
            ratios["between looks"].append(usual / statistics.fmean(without[j] for j in between))
            ratios["all steps"].append(sum(with_it) / sum(without))
    return {part: _summary(values) for part, values in ratios.items()}


def _timed(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _summary(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4)
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(1000)]
    error = statistics.stdev(medians)
    return {"time": round(middle, 4), "error": round(error, 4), "quartiles": [round(low, 4), round(high, 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", choices=[*LOOPS, []], help="which training loops; all")
    parser.add_argument("--periods", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loops = options.loops or list(LOOPS)
    results = {name: measure(name, options.periods, options.every) for name in loops}
    print(
        f"processor time, watched every {options.every} steps to unwatched, {options.periods} periods; target {TARGET}"
    )
    for name, rows in results.items():
        for part, row in rows.items():
            low, high = row["quartiles"]
            print(f"{name:8} {part:14} {row['time']:.3f} ± {row['error']:.3f}  ({low:.3f} … {high:.3f})")
    if options.json:
        record = {
            "command": " ".join(["python benchmarks/monitor_overhead.py", *sys.argv[1:]]),
            "target": TARGET,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
