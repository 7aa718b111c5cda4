"""What watching costs: training steps with the monitor against the same steps without it, interleaved in one run.

    python benchmarks/monitor_overhead.py [digits] [unet] [--rounds 20] [--every 10] [--json FILE]

A round is `every` steps of each, so that it holds one look. Times are processor time, which other programs on the
machine disturb least, as ratios in the same round (median over rounds, with quartiles). "unsampled" are rounds of
steps between two looks.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import scalelong
from scalelong.models.denoiser import Denoiser
from scalelong.training.display import Display
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.run import Run
from scalelong.training.trainer import Trainer
from scalelong.training.watching import watch

TARGET = 1.03
Step = Callable[[int], None]


def digits(folder: Path | None, every: int) -> Step:
    """The digits preset's own training step (U-ViT, width 64, 6 skips, batch 32, AdamW, EMA)."""
    config = preset("digits")
    trainer = Trainer(config, Examples(config, "train"))
    if folder is not None:
        config = scalelong.training.config.override(config, {"monitor.every": every})
        trainer.config = config
        trainer.watch = watch(trainer, None, Run(folder), Display("", 1, 0, 1, quiet=True))
    return lambda number: trainer.step() and None


def unet(folder: Path | None, every: int) -> Step:
    """A plain loop on a small diffusers U-Net (12 skips, 32×32, batch 16)."""
    torch.manual_seed(0)
    net = scalelong.build_unet("cifar10", block_out_channels=(32, 64, 64, 64), attention_head_dim=8)
    denoise, optimizer = Denoiser(net), torch.optim.AdamW(net.parameters(), 1e-4)
    x, t, eps = torch.randn(16, 3, 32, 32), torch.arange(16) * 60.0, torch.randn(16, 3, 32, 32)
    out = None if folder is None else folder / "stability.jsonl"
    monitor = scalelong.StabilityMonitor(net, (x[:8], t[:8]), every=every if folder else 0, out=out)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with monitor.step(number):
            losses = (denoise(x, t) - eps).square().flatten(1).mean(1)
            losses.mean().backward()
            monitor.note(loss=losses, t=t)
        monitor.note(grad_norm=torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()

    return step


LOOPS = {"digits": digits, "unet": unet}


def measure(name: str, rounds: int, every: int) -> dict[str, dict[str, float | list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        loops = {"plain": LOOPS[name](None, every), "watched": LOOPS[name](Path(folder), every)}
        number, ratios = 0, {"sampled": list[float](), "unsampled": list[float]()}
        for k in range(rounds + 2):
            seconds = {"sampled": dict[str, float](), "unsampled": dict[str, float]()}
            for loop in sorted(loops, reverse=bool(k % 2)):
                quiet = every - 2  # the two last steps of a round are looked at
                for part, span in (("unsampled", range(1, quiet + 1)), ("sampled", range(quiet + 1, every + 1))):
                    start = time.process_time()
                    for offset in span:
                        loops[loop](number + offset)
                    seconds[part][loop] = time.process_time() - start
            number += every
            if k >= 2:  # the first two rounds warm up
                seconds["sampled"] = {n: seconds["sampled"][n] + seconds["unsampled"][n] for n in loops}
                for part in ratios:
                    ratios[part].append(seconds[part]["watched"] / seconds[part]["plain"])
    return {part: _quartiles(values) for part, values in ratios.items()}


def _quartiles(values: list[float]) -> dict[str, float | list[float]]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"time": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", choices=[*LOOPS, []], help="which training loops; all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loops = options.loops or list(LOOPS)
    results = {name: measure(name, options.rounds, options.every) for name in loops}
    print(f"processor time, watched every {options.every} steps to unwatched, {options.rounds} rounds; target {TARGET}")
    for name, rows in results.items():
        for part, row in rows.items():
            what = "all steps" if part == "sampled" else "between looks"
            low, high = row["quartiles"]
            print(f"{name:12} {what:14} {row['time']:.3f}  ({low:.3f} … {high:.3f})")
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
