"""Two processes of one thread against one of two: the same steps of `digits`, by the clock.

Parallel work is worth what it saves on the clock, so this is the one figure that the machine's other programs disturb;
the note says how many there were. Batch and steps are the same in all cases, so are the losses (to 1e-5).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from scalelong.bench.figures import Figure
from scalelong.bench.timing import Spread

from scalelong.errors import ScaleLongError

STEPS = 10
_CODE = """
import sys, time, torch
from scalelong.bench.contestants import quiet
from scalelong.training.examples import Examples
from scalelong.training.trainer import Trainer
config = quiet("digits")
trainer = Trainer(config, Examples(config, config.data.split))
for _ in range(3):
    trainer.step()
clock, work = time.perf_counter(), time.process_time()
for _ in range(int(sys.argv[1])):
    trainer.step()
print("took", time.perf_counter() - clock, time.process_time() - work)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
LAYOUTS = {"1 × 1": (1, 1), "1 × 2": (1, 2), "2 × 1": (2, 1)}  # processes × threads


def processes(rounds: int) -> list[Figure]:
    """Clock and processor time of a step, each layout in turn in every round."""
    clocks: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    work: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(rounds):
        for name, layout in LAYOUTS.items():
            clock, spent = seconds_of(*layout)
            clocks[name].append(clock)
            work[name].append(spent)
    load = f"{os.getloadavg()[1]:.1f} programs on {os.cpu_count()} cores in the last five minutes"
    found = []
    for name, what in (("2 × 1", "2 processes × 1 thread"), ("1 × 2", "1 process × 2 threads")):
        for times, unit in ((clocks, "the clock"), (work, "processor time")):
            ratios = [one / many for one, many in zip(times["1 × 1"], times[name], strict=True)]
            found.append(Figure("processes", what, f"1 × 1, by {unit}", Spread.of(ratios), note=load))
    ratios = [b / a for a, b in zip(clocks["2 × 1"], clocks["1 × 2"], strict=True)]
    found.append(Figure("processes", "2 processes × 1 thread", "1 × 2, by the clock", Spread.of(ratios), note=load))
    return found


def seconds_of(world: int, threads: int) -> tuple[float, float]:
    """Seconds on the clock (of the slowest process) and of processor time (of all) for the steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world):
        alone = {} if world == 1 else {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if world > 1 else {}
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _CODE, str(STEPS)],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **alone, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    clock = work = 0.0
    for process in started:
        out, _ = process.communicate()
        line = next((line for line in out.splitlines() if line.startswith("took ")), None)
        if line is None:
            raise ScaleLongError(f"a process of {world} × {threads} ended with {process.returncode} and no time")
        clock, work = max(clock, float(line.split()[1])), work + float(line.split()[2])
    return clock, work
