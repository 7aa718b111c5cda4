"""What scaling costs on diffusers' CIFAR-10 U-Net: a training step's time, `apply` itself, and torch.compile's graphs.

    OMP_NUM_THREADS=1 python benchmarks/unet_cost.py --rounds 15 --json results/unet_cost.json

The untouched network, CS and LS take turns on one and the same network inside one process. Times of a step are
processor time, which other programs on the machine disturb least, as ratios to the untouched network in the same round
(median over rounds, with quartiles). The time of `apply` is the clock's.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.testing
from torch import nn

import scalelong
from scalelong import ConstantScaling, LearnableScaling, NoScaling

SCALINGS = {"untouched": NoScaling(), "CS": ConstantScaling(0.7), "LS": LearnableScaling()}
TARGETS = {"CS": 1.02, "LS": 1.04}
APPLY_TARGET_MS = 50.0


def step_seconds(net: nn.Module, x: torch.Tensor, t: torch.Tensor) -> float:
    """Processor time of forward and backward of one batch."""
    net.zero_grad(set_to_none=True)
    start = time.process_time()
    net(x, t).sample.square().mean().backward()
    return time.process_time() - start


def interleaved(net: nn.Module, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by scaling; every round takes all of them, in an order drawn anew."""
    x, t = torch.randn(batch_size, 3, 32, 32), torch.randint(1000, (batch_size,))
    seconds: dict[str, list[float]] = {name: [] for name in SCALINGS}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(SCALINGS), len(SCALINGS)):
            scalelong.apply(net, SCALINGS[name], replace=True)
            took = step_seconds(net, x, t)
            if turn:  # the first round warms up
                seconds[name].append(took)
        if turn:
            print(f"\rround {turn} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    scalelong.remove(net)
    return seconds


def apply_milliseconds(net: nn.Module, repeats: int = 9) -> dict[str, float]:
    """The median time of `apply` itself."""
    medians = {}
    for name, scaling in SCALINGS.items():
        took = []
        for _ in range(repeats if name != "untouched" else 0):
            start = time.perf_counter()
            scalelong.apply(net, scaling)
            took.append(1000 * (time.perf_counter() - start))
            scalelong.remove(net)
        if took:
            medians[name] = statistics.median(took)
    return medians


def compiled_graphs(net: nn.Module) -> dict[str, int]:
    """How many graphs torch.compile makes of a forward pass: one more than it breaks."""
    graphs = {}
    for name, scaling in SCALINGS.items():
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        torch.compile(scalelong.apply(net, scaling, replace=True), backend=counter)(
            torch.randn(1, 3, 32, 32), torch.tensor([5])
        )
        graphs[name] = counter.frame_count
    scalelong.remove(net)
    return graphs


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def measure(batch_size: int, rounds: int, compile_too: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = scalelong.build_unet("cifar10")
    seconds = interleaved(net, batch_size, rounds)
    base = seconds["untouched"]
    result: dict[str, Any] = {
        "network": f"diffusers UNet2DModel, {sum(p.numel() for p in net.parameters()):,} parameters, "
        f"{len(scalelong.describe(net).rows)} long skips",
        "batch_size": batch_size,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "step": {},
        "apply_ms": apply_milliseconds(net),
    }
    for name, took in seconds.items():
        ratios = [a / b for a, b in zip(took, base, strict=True)]
        low, middle, high = quartiles(ratios)
        result["step"][name] = {
            "seconds_median": statistics.median(took),
            "seconds_min": min(took),
            "ratio_median": middle,
            "ratio_quartiles": [low, high],
            "ratio_of_minima": min(took) / min(base),
            "target": TARGETS.get(name),
        }
    if compile_too:
        result["graphs"] = compiled_graphs(net)
    result["targets_met"] = (
        all(result["step"][name]["ratio_median"] <= target for name, target in TARGETS.items())
        and max(result["apply_ms"].values()) < APPLY_TARGET_MS
        and len(set(result.get("graphs", {"": 1}).values())) == 1
    )
    return result


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['network']}; forward + backward, batch {result['batch_size']}, {result['rounds']} rounds"]
    lines.append(f"{'':10} {'median s':>9} {'ratio':>7} {'quartiles':>15} {'target':>7} {'apply ms':>9} {'graphs':>7}")
    for name, row in result["step"].items():
        low, high = row["ratio_quartiles"]
        target = f"{row['target']:.2f}" if row["target"] else "–"
        took = f"{result['apply_ms'][name]:.1f}" if name in result["apply_ms"] else "–"
        graphs = result.get("graphs", {}).get(name, "–")
        lines.append(
            f"{name:10} {row['seconds_median']:9.3f} {row['ratio_median']:7.3f} {f'{low:.3f} … {high:.3f}':>15} "
            f"{target:>7} {took:>9} {graphs!s:>7}"
        )
    lines.append("targets met" if result["targets_met"] else "a target is missed")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="leave out the count of torch.compile's graphs")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    chosen = parser.parse_args(arguments)
    result = measure(chosen.batch_size, chosen.rounds, not chosen.no_compile)
    print(table(result))
    if chosen.json:
        words = ["--rounds", str(chosen.rounds), "--batch-size", str(chosen.batch_size)]
        command = " ".join([f"OMP_NUM_THREADS={result['threads']} python benchmarks/unet_cost.py", *words])
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({"command": command, **result}, indent=2) + "\n")
    return 0 if result["targets_met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
