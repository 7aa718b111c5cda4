"""What a person sees while runs train side by side: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from scalelong.experiments.plan import Job
from scalelong.experiments.scheduler import Ending
from scalelong.experiments.slots import Slot
from scalelong.runs.logs import Tail

LINES_EVERY = 10.0  # seconds, where there is no terminal
ROWS = 30  # of the live table


@dataclass
class State:
    """What is known of a job now."""

    job: Job
    tail: Tail
    status: str = "waiting"
    since: float = 0.0
    origin: int = 0  # the step that the log stood at when this process started
    first: int | None = None  # the first step that this process logged, at `since`
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        step = self.metrics.get("step", 0)
        return int(step) if isinstance(step, (int, float)) else 0

    @property
    def steps(self) -> int:
        return self.job.config.train.steps

    def speed(self, now: float) -> float | None:
        """Steps a second since the first step of this process was seen."""
        if self.status != "running" or self.first is None or self.step <= self.first:
            return None
        return (self.step - self.first) / max(1e-9, now - self.since)

    def left(self, now: float) -> str:
        """The time that training still needs; after it, what is going on."""
        if self.status == "running" and self.step >= self.steps:
            return "measuring"
        speed = self.speed(now)
        return "" if speed is None else clock((self.steps - self.step) / speed)


class Live:
    """A `Watcher` for people; on standard error, so that --json stays clean."""

    def __init__(self, jobs: Sequence[Job], *, quiet: bool = False) -> None:
        self.states = {job.name: State(job, Tail(job.folder / "metrics.jsonl")) for job in jobs}
        self.quiet = quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self._live: Any = None
        self._said = self._began = time.monotonic()

    def __enter__(self) -> Live:
        if self.terminal:
            from rich.console import Console
            from rich.live import Live as RichLive

            self._live = RichLive(
                get_renderable=self._table,
                console=Console(stderr=True, emoji=False),
                refresh_per_second=4,
                vertical_overflow="visible",
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------------------------------ what the scheduler tells

    def started(self, job: Job, slot: Slot) -> None:
        state = self.states[job.name]
        state.metrics = state.tail.read()
        state.status, state.origin, state.since, state.first = "running", state.step, time.monotonic(), None
        if not self.terminal:
            self.say(f"{job.name}: started ({slot.name})")

    def ended(self, ending: Ending) -> None:
        state = self.states[ending.job.name]
        state.metrics = state.tail.read()
        state.status = "done" if ending.ran else "stopped" if ending.stopped else "failed"
        if ending.ran and self.terminal:
            return
        took = f" after {clock(ending.seconds)}" if ending.seconds else ""
        self.say(f"{ending.job.name}: {ending.reason()}{took}{self._figures(state)}")
        if state.status == "failed":
            for line in ending.lines:
                self.say(f"    {line}")

    def look(self) -> None:
        now = time.monotonic()
        for state in self.states.values():
            if state.status == "running":
                state.metrics = state.tail.read()
                if state.first is None and state.step != state.origin:
                    state.first, state.since = state.step, now
        if not self.terminal and now - self._said >= LINES_EVERY:
            self._said = now
            for state in self.states.values():
                if state.status == "running" and 0 < state.step < state.steps:
                    self.say(
                        f"{state.job.name}: step {state.step} of {state.steps}{self._figures(state)}{_left(state, now)}"
                    )

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------------ how it looks

    @staticmethod
    def _figures(state: State) -> str:
        parts = [("loss", "loss"), ("val_loss", "validation"), ("grad_norm", "gradient")]
        known = [f"{title} {figure(state.metrics[name])}" for name, title in parts if name in state.metrics]
        return f", {', '.join(known)}" if known else ""

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        now = time.monotonic()
        bar = 8 if self._live is not None and self._live.console.width < 100 else 20
        done = sum(state.status == "done" for state in self.states.values())
        table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
        table.title = f"{done} of {len(self.states)} runs done · {clock(now - self._began)}"
        for column in ("run", "", "step", "loss", "validation", "gradient", "steps/s", "left"):
            table.add_column(column, justify="left" if column in ("run", "") else "right", no_wrap=True)
        marks = {"waiting": "[dim]·[/]", "running": "[cyan]▸[/]", "done": "[green]✓[/]", "stopped": "[yellow]■[/]"}
        for state in self._shown():
            speed = state.speed(now)
            style = "dim" if state.status == "waiting" else ""
            table.add_row(
                f"{marks.get(state.status, '[red]✗[/]')} {state.job.name}",
                ProgressBar(total=state.steps, completed=state.step, width=bar),
                f"{state.step}/{state.steps}",
                *(figure(state.metrics.get(name)) for name in ("loss", "val_loss", "grad_norm")),
                "" if speed is None else f"{speed:.3g}",
                state.left(now),
                style=style,
            )
        return table

    def _shown(self) -> list[State]:
        """All runs, or those that matter now where a terminal could not hold them all."""
        states = list(self.states.values())
        if len(states) <= ROWS:
            return states
        order = ("failed", "running", "stopped", "waiting", "done")
        kept = {id(s) for s in sorted(states, key=lambda state: order.index(state.status))[:ROWS]}
        return [state for state in states if id(state) in kept]


def figure(value: Any) -> str:
    """A number at four figures, or nothing."""
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def clock(seconds: float) -> str:
    """12 s, 3:05, 2:03:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _left(state: State, now: float) -> str:
    left = state.left(now)
    return f", {left} left" if left else ""
