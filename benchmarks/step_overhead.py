"""What a training step costs beside the plain loop (forward, backward, optimizer) of the same network.

    python benchmarks/step_overhead.py [--preset digits] [--rounds 30] [--json results/step_overhead.json]

Ours adds data, noise by counter, clipping, EMA, checks and bookkeeping. Processor time, the two interleaved in one
run, median ratio with quartiles. The plain loop gets its batch ready-made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from scalelong.runs.config import override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer


def plain_step(
    trainer: Trainer, optimizer: torch.optim.Optimizer, x_t: torch.Tensor, t: torch.Tensor, eps: torch.Tensor
):
    optimizer.zero_grad(set_to_none=True)
    loss = (trainer.denoise(x_t, t) - eps).square().mean()
    loss.backward()
    optimizer.step()


def timed(function, *arguments) -> float:
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def measure(name: str, rounds: int) -> dict[str, object]:
    config = override(preset(name), {"monitor.every": 0})
    examples = Examples(config, config.data.split)
    ours, plain = Trainer(config, examples), Trainer(config, examples)
    optimizer = torch.optim.AdamW(plain.net.parameters(), lr=1e-4, fused=True)
    batch = plain.batch(1)
    x_t = examples.process.add_noise(batch.x_0, batch.eps, batch.t)
    t = examples.process.network_time(batch.t)
    for _ in range(3):
        ours.step()
        plain_step(plain, optimizer, x_t, t, batch.eps)
    ratios, parts = [], {"data": [], "ema": []}
    for k in range(rounds):
        theirs = 0.0 if k % 2 else timed(plain_step, plain, optimizer, x_t, t, batch.eps)
        mine = timed(ours.step)
        theirs = theirs or timed(plain_step, plain, optimizer, x_t, t, batch.eps)
        ratios.append(mine / theirs)
        parts["data"].append(timed(ours.batch, k + 10) / theirs)
        parts["ema"].append(timed(ours.ema.update, k + 10) / theirs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    shares = {part: statistics.median(values) for part, values in parts.items()}
    return {"preset": name, "ratio": middle, "quartiles": [low, high], "target": 1.05, "share_of_plain_step": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(name, options.rounds) for name in options.preset or ["digits"]]
    for r in results:
        shares = ", ".join(f"{part} {share:.1%}" for part, share in r["share_of_plain_step"].items())
        quartiles = "{:.3f} … {:.3f}".format(*r["quartiles"])
        print(f"{r['preset']}: our step / plain loop = {r['ratio']:.3f} ({quartiles}); {shares}")
    if options.json:
        command = f"python benchmarks/step_overhead.py --rounds {options.rounds}"
        record = {
            "command": command,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
