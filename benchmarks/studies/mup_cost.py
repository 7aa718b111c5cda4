"""CPU time of a training step with μP over the same step without it.

    OMP_NUM_THREADS=1 python benchmarks/studies/mup_cost.py --json results/mup-cost.json

Two trainers of one network take turns, first one and then the other, so that a busy machine slows both equally.
Reported: the median over rounds of the ratio of both steps, with a 95 % interval of the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from scalelong.experiments.widths import widened
from scalelong.runs.config import override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer


def step(trainer: Trainer) -> float:
    started = time.process_time()
    trainer.step()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for width in (64, 128, 256):
        settings = {"monitor.every": 0, "train.log_every": 10**6, "train.steps": 10**6, "train.batch_size": 32}
        configs = [override(widened(preset("uvit-64"), width, name), settings) for name in ("standard", "mup")]
        examples = Examples(configs[0], configs[0].data.split)
        standard, mup = (Trainer(config, examples) for config in configs)
        for trainer in (standard, mup):
            step(trainer)
        ratios = []
        for k in range(options.rounds):
            first, second = (standard, mup) if k % 2 else (mup, standard)
            times = {id(first): step(first), id(second): step(second)}
            ratios.append(times[id(mup)] / times[id(standard)])
        ordered, half = sorted(ratios), 0.98 * options.rounds**0.5
        low, high = (ordered[round(options.rounds / 2 + side * half)] for side in (-1, 1))
        interval = [round(low, 4), round(high, 4)]
        row = {"width": width, "ratio": round(statistics.median(ratios), 4), "interval": interval}
        rows.append({**row, "rounds": options.rounds})
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        record = {"command": "OMP_NUM_THREADS=1 python benchmarks/studies/mup_cost.py", "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
