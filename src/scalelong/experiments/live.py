"""Progress of runs that train side by side: one bar per run in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from rich.progress import Task

from scalelong._text import number
from scalelong.experiments.plan import Job
from scalelong.experiments.scheduler import Ending, Slot
from scalelong.progress import bars, duration
from scalelong.runs.logs import Tail

LINES_EVERY = 10.0  # seconds between progress lines without a terminal
ROWS = 30  # bars shown at most
METRICS = {"loss": "loss", "val_loss": "validation", "grad_norm": "gradient"}
MARKS = {"failed": ("✗", "red"), "running": ("▸", "cyan"), "stopped": ("■", "yellow"), "waiting": ("·", "dim"),
         "done": ("✓", "green")}  # fmt: skip  # in the order in which rows are kept


class Live:
    """Shows the state of the jobs on standard error, so that --json output stays clean. Use it as a context manager."""

    def __init__(self, jobs: Sequence[Job], *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.progress = bars(refresh_per_second=4, disable=not self.terminal)
        self.tails: dict[str, Tail] = {}
        self.tasks: dict[str, Task] = {}
        self.status: dict[str, str] = {}
        self._last_lines = time.monotonic()
        self.add(jobs)

    def add(self, jobs: Sequence[Job]) -> None:
        """Show these jobs too."""
        for job in jobs:
            self.tails[job.name], self.status[job.name] = Tail(job.folder / "metrics.jsonl"), "waiting"
            self.progress.add_task(job.name, start=False, total=job.config.train.steps, left="", values=())
        self.tasks = {task.description: task for task in self.progress.tasks}
        self._show()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def started(self, job: Job, slot: Slot) -> None:
        self.status[job.name] = "running"
        # Steps of an earlier process do not count for the speed.
        self.progress.reset(self.tasks[job.name].id, completed=_step(self.tails[job.name].read()))
        self._show()
        if not self.terminal:
            self.say(f"{job.name}: started ({slot.name})")

    def ended(self, ending: Ending) -> None:
        name = ending.job.name
        self._read(name)
        self.status[name] = "done" if ending.ran else "stopped" if ending.stopped else "failed"
        self.progress.update(self.tasks[name].id, left="")
        self.progress.stop_task(self.tasks[name].id)
        self._show()
        if ending.ran and self.terminal:
            return
        took = f" after {duration(ending.seconds)}" if ending.seconds else ""
        self.say(", ".join([f"{name}: {ending.reason()}{took}", *self.tasks[name].fields["values"]]))
        if self.status[name] == "failed":
            for line in ending.lines:
                self.say(f"    {line}")

    def refresh(self) -> None:
        """Read the logs of running jobs; without a terminal, print a line for each from time to time."""
        running = [task for name, task in self.tasks.items() if self.status[name] == "running"]
        for task in running:
            self._read(task.description)
        if not self.terminal and time.monotonic() - self._last_lines >= LINES_EVERY:
            self._last_lines = time.monotonic()
            for task in running:
                if 0 < task.completed < (task.total or 0):
                    step = f"{task.description}: step {task.completed:.0f} of {task.total:.0f}"
                    self.say(", ".join(filter(None, [step, task.fields["left"], *task.fields["values"]])))

    def say(self, line: str) -> None:
        if self.terminal:
            self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _read(self, name: str) -> None:
        """Update the bar and the metrics of a job from its log."""
        task, latest = self.tasks[name], self.tails[name].read()
        values = [f"{title} {number(latest[key])}" for key, title in METRICS.items() if _is_number(latest.get(key))]
        self.progress.update(task.id, completed=_step(latest), values=values)
        seconds = task.time_remaining
        left = "" if seconds is None else f"{duration(seconds)} left"
        self.progress.update(task.id, left="measuring" if task.finished else left)

    def _show(self) -> None:
        """Update the marks, and hide the least interesting runs if a terminal cannot show all of them."""
        ranked = sorted(self.tasks, key=lambda name: list(MARKS).index(self.status[name]))
        for rank, name in enumerate(ranked):
            self.progress.update(self.tasks[name].id, mark=MARKS[self.status[name]], visible=rank < ROWS)


def _step(latest: dict[str, Any]) -> int:
    return int(latest["step"]) if _is_number(latest.get("step")) else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
