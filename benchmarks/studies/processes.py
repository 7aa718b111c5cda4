"""One process against two (DDP over gloo, one thread each): speed, and the share of communication.

    python benchmarks/studies/processes.py --out results/processes.json

Two processes take turns with three cases, round by round: one of them steps on the whole batch while the other waits,
both step by DDP on half of it each, and both compute their half without exchanging gradients. Wall times need idle
cores: the record has the load and the spread. CPU times do not.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from scalelong.runs.config import override
from scalelong.training.examples import Examples
from scalelong.training.presets import preset
from scalelong.training.trainer import Trainer, _adamw
from scalelong.training.update import Ema, Update

PRESETS = {"digits-uvit": 10, "cifar10-tiny": 1}  # steps per turn
ROUNDS = 8
CASES = ("one process", "two processes", "two without exchange")


def measure(name: str, steps: int, rounds: int) -> dict[str, Any] | None:
    """Wall and CPU milliseconds per step of each case, in the main process."""
    settings = {"train.log_every": 10**6, "train.steps": 10**6, "monitor.every": 0}
    config = override(preset(name), settings)
    trainer = Trainer(config, Examples(config, "train"))
    main, size = trainer.accelerator.is_main_process, config.train.batch_size

    net = copy.deepcopy(trainer.ema.net).requires_grad_(True).train()  # has none of DDP's hooks
    average = Ema(net, config.ema.decay, config.ema.warmup)
    update = Update(config.train, _adamw(config, net), average, None, trainer.accelerator.device)

    def local(images: int) -> None:  # a step that exchanges nothing
        number = trainer.progress.step + 1
        batch = trainer.examples.batch(number, 0, images).to(trainer.accelerator.device)
        net.zero_grad(set_to_none=True)
        loss = trainer.losses(batch, net).mean()
        loss.backward()
        update.apply(number, loss.detach(), torch.nn.utils.clip_grad_norm_(net.parameters(), config.train.clip or 1e9))

    cases: dict[str, Callable[[], Any]] = dict(
        zip(CASES, (lambda: local(size) if main else None, trainer.step, lambda: local(size // 2)), strict=True)
    )
    times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for round_ in range(rounds + 1):  # the first warms up
        order = list(cases)[round_ % 3 :] + list(cases)[: round_ % 3]
        for case in order:
            trainer.accelerator.wait_for_everyone()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                cases[case]()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if round_:
                times[case].append((1000 * spent[0] / steps, 1000 * spent[1] / steps))
    if not main:
        return None
    one, two, free = (times[case] for case in CASES)
    ratios = {
        "speed-up, wall": [a[0] / b[0] for a, b in zip(one, two, strict=True)],
        "share of communication, wall": [1 - c[0] / b[0] for b, c in zip(two, free, strict=True)],
        "share of communication, CPU": [1 - c[1] / b[1] for b, c in zip(two, free, strict=True)],
        **{f"{case}, ms of CPU per step": [cpu for _, cpu in times[case]] for case in CASES},
        **{f"{case}, ms per step": [wall for wall, _ in times[case]] for case in CASES},
    }
    parameters = sum(p.numel() for p in trainer.net.parameters())
    return {"batch": size, "gradient bytes": 4 * parameters} | {
        name: [round(value, 4) for value in quantiles(values, n=4, method="inclusive")]
        for name, values in ratios.items()
    }


def worker(rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    found = {name: measure(name, steps, rounds) for name, steps in PRESETS.items()}
    torch.distributed.destroy_process_group()
    if os.environ["RANK"] == "0":
        command = "python benchmarks/studies/processes.py"
        record = {"command": command, "torch": torch.__version__, "cores": os.cpu_count(), "rounds": rounds}
        record |= {"load average": os.getloadavg()[0], "values": "quartiles: low, median, high", "presets": found}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options.rounds, options.out)
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, __file__, *sys.argv[1:]], check=True, env=environment)
