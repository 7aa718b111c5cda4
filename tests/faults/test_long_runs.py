"""Ten thousand steps hold memory and open files; a million lines of metrics open, resume and report in seconds."""

import gc
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from fault_runs import finish, losses, small_config

from scalelong.report import write_report
from scalelong.runs.logs import JsonLines
from scalelong.runs.run import Run
from scalelong.training.loop import train
from scalelong.training.trainer import Trainer
from tiny_runs import read_lines

STEPS, LINES = 10_000, 1_000_000


def resident():
    """Bytes of this process in memory, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measured(folder, readings, every):
    """Train, and note (step, bytes, open files) on the way."""
    step, rows = Trainer.step, []

    def noted(trainer):
        outcome = step(trainer)
        if trainer.progress.step % every == 0:
            gc.collect()
            rows.append((trainer.progress.step, resident(), len(os.listdir("/proc/self/fd"))))
            readings.write_text(json.dumps(rows))
        return outcome

    Trainer.step = noted
    observers = {"monitor__every": 10, "validate__every": 500, "sample__every": 500, "sample__n": 4, "sample__steps": 4}
    train(small_config(train__steps=STEPS, checkpoint__every=100, **observers), folder, quiet=True)


@pytest.mark.slow
def test_ten_thousand_steps_hold_memory_and_open_files(tmp_path, imported, note):
    readings = tmp_path / "readings.json"
    assert finish(lambda: measured(tmp_path / "run", readings, every=100), timeout=3600) == 0
    rows = np.array(json.loads(readings.read_text()), dtype=float)
    later = rows[rows[:, 0] >= 2000]  # allocators and caches have settled
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0])
    assert slope < 500, f"memory grows by {slope:.0f} bytes a step"
    assert len(set(later[:, 2])) == 1, "open files come and go"
    assert len(losses(tmp_path / "run")) == STEPS
    happened = (
        f"memory {later[0, 1] / 2**20:.0f} → {later[-1, 1] / 2**20:.0f} MiB from step 2,000 to {STEPS:,}: "
        f"{slope:+.0f} bytes per step; {int(later[-1, 2])} open files throughout"
    )
    note("long runs", f"{STEPS:,} steps with monitor, checkpoints, validation and samples", 1, happened)


@pytest.mark.slow
def test_a_million_lines_open_resume_and_report_in_seconds(tmp_path, note):
    folder, more = tmp_path / "run", LINES + 2
    train(small_config(train__steps=2), folder, quiet=True)
    row = read_lines(folder / "metrics.jsonl")[-1]
    with open(folder / "metrics.jsonl", "a") as file:
        for step in range(3, LINES + 1):
            file.write(json.dumps({**row, "step": step, "loss": 0.5 + 1 / step}) + "\n")
        file.write('{"step": 10000')
    seconds = {}

    def timed(name, action):
        started = time.process_time()
        answer = action()
        seconds[name] = time.process_time() - started
        return answer

    timed("cut", lambda: JsonLines(folder / "metrics.jsonl").keep_until(LINES))
    entries = timed("read", lambda: read_lines(folder / "metrics.jsonl"))
    assert len(entries) == LINES
    _move_checkpoint(folder, LINES)
    timed("resume and two steps", lambda: train(small_config(train__steps=more), folder, quiet=True))
    page = timed("report", lambda: write_report([folder], tmp_path / "page.html"))
    assert page.stat().st_size < 5 << 20
    assert losses(folder)[-1][0] == more
    assert seconds["cut"] < 1
    assert max(seconds.values()) < 20, seconds  # 3 to 5 here; a slow machine is no fault
    told = "processor time: " + ", ".join(f"{name} {taken:.2g} s" for name, taken in seconds.items())
    note("long runs", f"a run folder of {LINES:,} metric lines", 1, told)


def _move_checkpoint(folder, step):
    """Say that the newest checkpoint is of a later step, as after so many steps."""
    from dataclasses import replace

    from scalelong.training import checkpoint

    place = Run(folder).checkpoints_path
    state, _ = checkpoint.newest(place)
    checkpoint.save(place, replace(state, progress=replace(state.progress, step=step)), keep=1)
