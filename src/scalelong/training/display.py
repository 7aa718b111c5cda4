"""What a person sees of a run while it trains: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from scalelong.training.trainer import Outcome


class Display:
    """Shows loss, gradient norm, images a second and the time left; silent on all but the first process."""

    def __init__(self, title: str, steps: int, done: int, batch_size: int, *, quiet: bool = False) -> None:
        self.title, self.steps, self.batch_size, self.quiet = title, steps, batch_size, quiet
        self.started, self.first = time.monotonic(), done
        self.said = self.started
        self._bar: Any = None
        self._task: Any = None
        self.terminal = sys.stderr.isatty() and not quiet
        self._done = done

    def __enter__(self) -> Display:
        if self.terminal:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True, emoji=False),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, completed=self._done, figures="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, number: int, outcome: Outcome) -> None:
        if self.quiet:
            return
        now = time.monotonic()
        if self._bar is not None:
            if now - self.said >= 0.1 or number == self.steps:
                self.said = now
                self._bar.update(self._task, completed=number, figures=self._figures(number, outcome, now))
        elif now - self.said >= 10 or number == self.steps:
            self.said = now
            left = (self.steps - number) * (now - self.started) / max(1, number - self.first)
            self.say(
                f"{self.title}: step {number} of {self.steps}, {self._figures(number, outcome, now)}, {left:.0f} s left"
            )

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to something that shows its own progress."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def _figures(self, number: int, outcome: Outcome, now: float) -> str:
        speed = (number - self.first) * self.batch_size / max(1e-9, now - self.started)
        return f"loss {outcome.loss:.4f} · gradient {outcome.grad_norm:.3f} · {speed:.0f} images/s"
