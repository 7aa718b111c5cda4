"""What training a run cost, in RUN/resources.json: times, peak memory, and what else used the processor meanwhile."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalelong.errors import NonFiniteError, one_line
from scalelong.files import write_text
from scalelong.runs.run import RESOURCES, Run

FORMAT = 2  # 1 counted start-up and the preparation of data too
ALONE = 0.1  # CPU seconds of other processes per second of a run that still counts as alone
PROC = Path("/proc/self")


@contextmanager
def recorded(run: Run) -> Iterator[None]:
    """Add the cost of what happens inside to RUN/resources.json; an exception is recorded as `failure`."""
    import torch

    memory = _reset_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    wall, own, everybody = time.monotonic(), time.process_time(), _busy_seconds()
    failed: dict[str, Any] = {}
    try:
        yield
    except Exception as error:
        failed = {"failure": one_line(error), "nonfinite": isinstance(error, NonFiniteError)}
        raise
    finally:
        if run.folder.is_dir():
            before: dict[str, Any] = run.resources if run.resources.get("format") == FORMAT else {}
            cpu, busy = time.process_time() - own, _busy_seconds() - everybody
            now = {
                "format": FORMAT,
                "cpu_seconds": before.get("cpu_seconds", 0.0) + cpu,
                "wall_seconds": before.get("wall_seconds", 0.0) + time.monotonic() - wall,
                "threads": torch.get_num_threads(),
                "processes": before.get("processes", 0) + 1,
            }
            if busy >= cpu / 2 and ("other_cpu_seconds" in before or not before):  # else the system does not count
                now["other_cpu_seconds"] = before.get("other_cpu_seconds", 0.0) + max(0.0, busy - cpu)
            if memory:
                now["peak_memory"] = max(before.get("peak_memory", 0), _peak_memory())
            if torch.cuda.is_available():
                now["peak_gpu_memory"] = max(before.get("peak_gpu_memory", 0), torch.cuda.max_memory_allocated())
            rounded: dict[str, Any] = {key: round(value, 3) for key, value in now.items()}
            write_text(run.folder / RESOURCES, json.dumps(rounded | failed) + "\n")
            run.__dict__.pop("resources", None)


def ran_alone(resources: dict[str, float]) -> bool:
    """Whether almost nothing else used the processor, so that times compare. False if that is not recorded."""
    other, wall = resources.get("other_cpu_seconds"), resources.get("wall_seconds")
    return other is not None and wall is not None and other <= ALONE * wall


def _busy_seconds() -> float:
    """CPU time of all processes on the machine."""
    import psutil

    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))


def _reset_peak() -> bool:
    """Forget the peak memory of start-up and preparation. Linux only; elsewhere peak memory is not reported."""
    try:
        (PROC / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_memory() -> int:
    """The highest resident memory since `_reset_peak`, in bytes."""
    status = (PROC / "status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
