"""Run jobs in separate processes, one per slot, until all have ended or a signal stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.errors import invalid
from scalelong.experiments.plan import Job
from scalelong.experiments.worker import JOB, is_finished
from scalelong.runs.logs import last_lines

if TYPE_CHECKING:
    from scalelong.experiments.live import Live

WORKER = [sys.executable, "-m", "scalelong.experiments.worker"]
LAUNCH = ["-m", "torch.distributed.run", "--standalone"]  # --standalone: a free port of its own
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Each run has processes of its own, even if the comparison itself was launched by torchrun.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
POLL = 0.2  # seconds between two checks of the processes
GRACE = 60.0  # seconds to write a checkpoint if the scheduler itself fails


@dataclass(frozen=True)
class Slot:
    """Room for one job at a time, with the environment variables of its processes."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    processes: int = 1

    @property
    def command(self) -> list[str]:
        if self.processes == 1:
            return WORKER
        return [WORKER[0], *LAUNCH, f"--nproc-per-node={self.processes}", *WORKER[1:]]


def make_slots(jobs: int, limit: int | None, gpus: Sequence[str], cores: int, per_run: int = 1) -> list[Slot]:
    """Slots for `jobs` runs: one per `per_run` GPUs, otherwise one per core, or `limit` (--jobs) of them.

    The cores are divided among the slots. Two torch processes of two threads each on two cores slow each other down up
    to fifty-fold, because their threads spin while they wait. A smaller OMP_NUM_THREADS of the user is respected.
    """
    if limit is not None and limit < 1:
        raise invalid("--jobs", "an integer >= 1", limit)
    if per_run < 1 or per_run > max(1, len(gpus)):
        raise invalid("--gpus", f"an integer from 1 to {max(1, len(gpus))}, the visible GPUs", per_run)
    groups = [",".join(gpus[k : k + per_run]) for k in range(0, len(gpus) - per_run + 1, per_run)]
    count = max(1, min(jobs, limit or len(groups) or cores))
    threads, own = max(1, cores // (count * per_run)), os.environ.get("OMP_NUM_THREADS", "")
    if own.isdecimal() and int(own):
        threads = min(threads, int(own))
    environment = dict.fromkeys(THREADS, str(threads))
    if not gpus:
        return [Slot(f"{threads} thread(s)", environment)] * count
    return [
        Slot(f"gpu {group}", environment | {"CUDA_VISIBLE_DEVICES": group}, per_run)
        for group in islice(cycle(groups), count)
    ]


def usable_cores() -> int:
    """Cores that this process may use; in a container these may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: indices or UUIDs."""
    import torch

    count = torch.cuda.device_count()  # asks the driver and allocates nothing on a GPU
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(k) for k in range(count)]


@dataclass(frozen=True)
class Ending:
    """How a job ended. `code` is the exit code (negative: killed by that signal), or None if the job never started."""

    job: Job
    code: int | None
    lines: tuple[str, ...] = ()  # the end of its log, if it failed
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.code == 0

    @property
    def stopped(self) -> bool:
        """Whether a request to stop ended the job or kept it from starting."""
        return self.code is None or self.code in (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)

    def reason(self) -> str:
        """What happened, as the end of a sentence that starts with the job's name."""
        if self.ran:
            return "done"
        if self.code is None:
            return "was not started"
        if self.code < 0:
            known = -self.code in set(signal.Signals)
            return f"was killed by {signal.Signals(-self.code).name if known else f'signal {-self.code}'}"
        return "was stopped after a checkpoint" if self.stopped else f"failed with exit code {self.code}"


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[Slot], logs: Path, display: Live, more: Callable[[], Sequence[Job]] = tuple
) -> tuple[tuple[Ending, ...], int | None]:
    """Run all jobs. Returns how each ended, in the order of `jobs`, and the signal that stopped them, if any.

    A job that fails does not stop the others. SIGINT and SIGTERM are forwarded as SIGTERM, on which a run writes a
    checkpoint and exits; a second signal kills. Whenever a job has ended, `more` returns those that it made possible.
    """
    planned: list[Job] = []
    waiting: list[Job] = []
    running: list[_Running] = []
    endings: dict[str, Ending] = {}

    def take(new: Sequence[Job]) -> None:
        planned.extend(new)
        for job in new:
            if is_finished(job):
                endings[job.name] = Ending(job, 0)
                display.ended(endings[job.name])
            else:
                waiting.append(job)

    take(jobs)
    free = list(slots)
    with _record_signals() as received:
        try:
            forwarded = 0
            while running or (waiting and not received):
                while waiting and free and not received:
                    running.append(_start(waiting.pop(0), free.pop(0), logs))
                    display.started(running[-1].job, running[-1].slot)
                if len(received) > forwarded:
                    forwarded = len(received)
                    _stop(running, display, kill=forwarded > 1)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    free.insert(0, one.slot)
                    one.process.communicate()  # closes its standard input
                    code = one.process.returncode
                    if code == 1 and received and one.slot.processes > 1:
                        code = 128 + signal.SIGTERM  # torchrun's own code, after its processes have stopped
                    lines = last_lines(logs / f"{one.job.name}.log") if code else []
                    ending = Ending(one.job, code, tuple(lines), time.monotonic() - one.started)
                    endings[one.job.name] = ending
                    display.ended(ending)
                    take(more())
                display.refresh()
                time.sleep(POLL)
        finally:  # leave no process behind, whatever failed here
            for one in running:
                one.process.terminate()
            for one in running:
                try:
                    one.process.communicate(timeout=GRACE)
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.communicate()
    return tuple(endings.get(job.name, Ending(job, None)) for job in planned), (received[0] if received else None)


def _start(job: Job, slot: Slot, logs: Path) -> _Running:
    logs.mkdir(parents=True, exist_ok=True)
    distance = None if job.distance is None else asdict(job.distance)
    message = {"config": job.config.to_dict(), "folder": str(job.folder), "distance": distance, "record": job.record}
    own = {key: value for key, value in os.environ.items() if key not in DISTRIBUTED}
    with open(logs / f"{job.name}.log", "ab") as log:
        process = subprocess.Popen(
            slot.command, stdout=log, stderr=log, env=own | slot.environment | {JOB: json.dumps(message)},
            stdin=subprocess.PIPE,  # stays open: when it closes, every process of the run knows that we are gone
            start_new_session=True,  # a Ctrl-C in the terminal reaches only us, and we forward it once
        )  # fmt: skip
    return _Running(job, slot, process, time.monotonic())


def _stop(running: Sequence[_Running], display: Live, kill: bool) -> None:
    for one in running:
        one.process.kill() if kill else one.process.terminate()
    if running:
        after = "" if kill else ": each writes a checkpoint and the same command resumes; interrupt again to kill"
        display.say(f"{'killing' if kill else 'stopping'} {len(running)} run(s){after}")


@contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Record SIGINT and SIGTERM instead of acting on them."""
    received: list[int] = []
    before = {}
    with suppress(ValueError):  # not the main thread: somebody else handles signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
