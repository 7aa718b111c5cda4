"""Run jobs in processes of their own, so many side by side, until all have ended or somebody stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from scalelong.experiments.distance import is_measured
from scalelong.experiments.plan import Job
from scalelong.experiments.slots import Slot
from scalelong.runs.logs import last_lines

WORKER = [sys.executable, "-m", "scalelong.experiments.worker"]
DISTRIBUTED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # each run is alone
POLL = 0.2  # seconds between two looks
GRACE = 60.0  # seconds for a checkpoint, should the scheduler itself fail


@dataclass(frozen=True)
class Ending:
    """How a job ended: `code` as a process gives it (negative: the signal that killed it), None if it never ran."""

    job: Job
    code: int | None
    lines: tuple[str, ...] = ()  # the last of its log, where it failed
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.code == 0

    @property
    def stopped(self) -> bool:
        """Ended by the request to stop, or not started because of it."""
        return self.code is None or self.code in (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)

    def reason(self) -> str:
        """One clause for people."""
        if self.ran:
            return "done"
        if self.code is None:
            return "was not started"
        if self.code < 0:
            try:
                return f"was killed by {signal.Signals(-self.code).name}"
            except ValueError:
                return f"was killed by signal {-self.code}"
        if self.stopped:
            return "was stopped after a checkpoint"
        return f"failed with exit code {self.code}"


class Watcher(Protocol):
    """Who shows what happens."""

    def started(self, job: Job, slot: Slot) -> None: ...
    def ended(self, ending: Ending) -> None: ...
    def look(self) -> None: ...
    def say(self, line: str) -> None: ...


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(
    jobs: Sequence[Job], slots: Sequence[Slot], logs: Path, watcher: Watcher
) -> tuple[tuple[Ending, ...], int | None]:
    """How each job ended, in the given order, and the signal that stopped them all, if one did.

    A job that fails does not stop the others. SIGINT and SIGTERM are passed on as SIGTERM, on which a run writes a
    checkpoint and leaves; a second one kills.
    """
    endings: dict[str, Ending] = {}
    waiting: list[Job] = []
    for job in jobs:
        if is_finished(job):
            endings[job.name] = Ending(job, 0)
            watcher.ended(endings[job.name])
        else:
            waiting.append(job)
    running: list[_Running] = []
    free = list(slots)
    with _signals() as received:
        try:
            told = 0
            while running or (waiting and not received):
                while waiting and free and not received:
                    running.append(_start(waiting.pop(0), free.pop(0), logs))
                    watcher.started(running[-1].job, running[-1].slot)
                if len(received) > told:
                    told = len(received)
                    _pass_on(running, watcher, kill=told > 1)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    free.insert(0, one.slot)
                    endings[one.job.name] = _ending(one, logs)
                    watcher.ended(endings[one.job.name])
                watcher.look()
                time.sleep(POLL)
        finally:  # whatever happened here, no run is left behind
            for one in running:
                one.process.terminate()
            for one in running:
                try:
                    one.process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()
                _let_go(one)
    for job in waiting:
        endings[job.name] = Ending(job, None)
    return tuple(endings[job.name] for job in jobs), (received[0] if received else None)


def is_finished(job: Job) -> bool:
    """Whether all that a job makes is there already, so that no process need start to see it."""
    try:
        step = json.loads((job.folder / "model" / "step.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if step != job.config.train.steps:
        return False
    return job.distance is None or is_measured(job.folder, job.distance, step)


def log_of(job: Job, logs: Path) -> Path:
    return logs / f"{job.name}.log"


def _start(job: Job, slot: Slot, logs: Path) -> _Running:
    logs.mkdir(parents=True, exist_ok=True)
    words = {
        "config": job.config.to_dict(),
        "folder": str(job.folder),
        "distance": None if job.distance is None else job.distance.to_dict(),
    }
    with open(log_of(job, logs), "ab") as log:
        process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={k: v for k, v in os.environ.items() if k not in DISTRIBUTED} | slot.environment,
            start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and we pass it on once
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it may have ended already, and its log says why
        process.stdin.write(json.dumps(words).encode() + b"\n")
        process.stdin.flush()  # and left open: its end tells the run that we are gone
    return _Running(job, slot, process, time.monotonic())


def _ending(one: _Running, logs: Path) -> Ending:
    code = one.process.returncode
    _let_go(one)
    lines = tuple(last_lines(log_of(one.job, logs))) if code != 0 else ()
    return Ending(one.job, code, lines, time.monotonic() - one.started)


def _let_go(one: _Running) -> None:
    if one.process.stdin is not None:
        with suppress(BrokenPipeError):
            one.process.stdin.close()


def _pass_on(running: Sequence[_Running], watcher: Watcher, kill: bool) -> None:
    for one in running:
        if kill:
            one.process.kill()
        else:
            one.process.terminate()
    if running:
        many = f"{len(running)} run(s)"
        watcher.say(
            f"killing {many}"
            if kill
            else f"stopping {many}: each writes a checkpoint and the same command goes on; once more kills"
        )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM, noted instead of acted on."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: somebody else handles signals
        pass
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
