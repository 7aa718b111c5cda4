"""Measure how the oscillation on the probe depends on its number of images.

    python benchmarks/studies/probe_size.py [--steps 400] [--sizes 4 8 16 32] [--json FILE]

One digits run with one monitor per size, recorded at every step. For the windows of 50 steps that end after step 100:
the median oscillation of ‖h_i‖, and how each window compares with the largest probe (standard deviation of the log
ratio, and correlation of the logarithms).
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.monitor.monitor import StabilityMonitor
from scalelong.training.examples import Examples
from scalelong.training.observers import probe_call
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer

FIRST = 100


class Several:
    """Several monitors in place of one."""

    def __init__(self, monitors: dict[int, StabilityMonitor]) -> None:
        self.monitors = monitors

    def step(self, step: int, batch: Any = None) -> AbstractContextManager[None]:
        stack = ExitStack()
        for monitor in self.monitors.values():
            stack.enter_context(monitor.step(step))
        return stack

    def note(self, **values: Any) -> None: ...


def measure(steps: int, sizes: list[int]) -> dict[str, dict[str, dict[int, float]]]:
    config = preset("digits-uvit")
    trainer = Trainer(config, Examples(config, "train"))
    monitors = {}
    for n in sizes:
        batch = trainer.examples.probe(n)
        monitors[n] = StabilityMonitor(trainer.net, probe_call(trainer, batch), t=batch.t, every=1)
    trainer.monitor = Several(monitors)  # type: ignore[assignment]
    seen: dict[int, list[list[float]]] = {n: [] for n in sizes}
    for _ in range(steps):
        trainer.step()
        if trainer.progress.step >= FIRST:
            for n, monitor in monitors.items():
                assert monitor.last is not None
                seen[n].append(monitor.last["oscillation"]["probe"]["backbone"])
    largest, found = max(sizes), {}
    for i in (1, len(seen[largest][0])):
        each = {n: np.log(np.array(rows)[:, i - 1]) for n, rows in seen.items()}
        found[f"h_{i}"] = {
            "median": {n: round(float(np.exp(np.median(each[n]))), 5) for n in sizes},
            "spread": {n: round(float(np.std(each[n] - each[largest])), 3) for n in sizes},
            "correlation": {n: round(float(np.corrcoef(each[n], each[largest])[0, 1]), 3) for n in sizes},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.steps, options.sizes)
    for point, rows in found.items():
        for what, values in rows.items():
            print(f"{point}  {what:12}", "  ".join(f"{n}: {value:g}" for n, value in values.items()))
    if options.json:
        command = " ".join(["python benchmarks/studies/probe_size.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
