"""One run of a comparison in a process of its own: `python -m scalelong.experiments.worker` with the job on its input.

Its input stays open as long as the comparison lives. When it ends (the comparison was killed, say) the run
stops as on SIGTERM: with a checkpoint, so that nothing trains on unseen and the same command goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scalelong.errors import MissingExtraError, ScaleLongError

RESOURCES = "resources.json"
PATIENCE = 30.0  # seconds that a former process of the same run has to write its checkpoint


def main() -> None:
    job = json.loads(_first_line(sys.stdin.fileno()))
    threading.Thread(target=_stop_at_end, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        raise SystemExit(run_job(job))
    except (ScaleLongError, MissingExtraError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def run_job(job: dict[str, Any]) -> int:
    """Train, then measure the distance; what it took stands in RUN/resources.json. Returns the exit code."""
    from scalelong.experiments.distance import DistanceSpec, is_measured, measure_distance
    from scalelong.runs.config import Config
    from scalelong.runs.run import Run
    from scalelong.training.loop import train

    started = time.monotonic()
    config, folder = Config.from_dict(job["config"]), Path(job["folder"])
    _wait_for_lock(Run(folder))
    try:
        result = train(config, folder)
    finally:
        _record(folder, started)
    if not result.finished:
        return 128 + (result.signal or 0)
    if job["distance"] is not None:
        spec = DistanceSpec(**job["distance"])
        if not is_measured(folder, spec, config.train.steps):
            print(f"Fréchet distance: {spec.n} samples", file=sys.stderr, flush=True)
            measure_distance(folder, spec)
    return 0


def _first_line(source: int) -> bytes:
    """Read without a buffer: Python cannot shut down while a thread waits inside one."""
    line = b""
    while not line.endswith(b"\n") and (part := os.read(source, 1 << 16)):
        line += part
    return line


def _stop_at_end(source: int) -> None:
    while os.read(source, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_for_lock(run: Any) -> None:
    """A comparison that was killed leaves runs that are writing their last checkpoint: let them."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with run.locked():
                return
        except ScaleLongError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _record(folder: Path, started: float) -> None:
    """Add this process's time to RUN/resources.json; of memory, keep the most that any process had."""
    import torch

    from scalelong.files import write_text

    if not folder.is_dir():
        return
    before = read_resources(folder)
    now = {
        "cpu_seconds": before.get("cpu_seconds", 0.0) + time.process_time(),
        "wall_seconds": before.get("wall_seconds", 0.0) + time.monotonic() - started,
        "peak_memory": max(before.get("peak_memory", 0), _peak_memory()),
        "peak_gpu_memory": max(
            before.get("peak_gpu_memory", 0), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        ),
        "processes": before.get("processes", 0) + 1,
        "threads": torch.get_num_threads(),
    }
    write_text(folder / RESOURCES, json.dumps({k: round(v, 3) for k, v in now.items()}) + "\n")


def read_resources(folder: Path) -> dict[str, Any]:
    """What RUN/resources.json holds: times in seconds, memory in bytes; empty where there is none."""
    try:
        facts = json.loads((folder / RESOURCES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(facts, dict):
        return {}
    return {k: v for k, v in facts.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _peak_memory() -> int:
    """Bytes that this process held at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
