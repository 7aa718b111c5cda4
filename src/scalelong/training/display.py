"""The progress of a run on standard error: one line in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from scalelong.progress import bars, duration
from scalelong.training.trainer import Outcome


class Display:
    """Shows loss, gradient norm, images per second and the time left. Use it as a context manager."""

    def __init__(self, title: str, steps: int, done: int, batch_size: int, *, quiet: bool = False) -> None:
        self.title, self.steps, self.done, self.batch_size, self.quiet = title, steps, done, batch_size, quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.started = self.updated = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self.terminal:
            self._bar = bars()
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, completed=self.done, values=())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, number: int, outcome: Outcome | None) -> None:
        """Update the bar ten times per second, or print a line every ten seconds."""
        now = time.monotonic()
        if self.quiet or (now - self.updated < (0.1 if self._bar is not None else 10) and number < self.steps):
            return
        self.updated, elapsed, count = now, max(1e-9, now - self.started), max(1, number - self.done)
        speed = count * self.batch_size / elapsed
        values: tuple[str, ...] = (f"{speed:.0f} images/s",)
        if outcome is not None:  # of the last logged step
            values = (f"loss {outcome.loss:.4f}", f"gradient {outcome.grad_norm:.3f}", *values)
        left = f"{duration((self.steps - number) * elapsed / count)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=number, left=left, values=values)
        else:
            self.say(f"{self.title}: step {number} of {self.steps}, {left}, {', '.join(values)}")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to something that shows its own progress."""
        self.__exit__()
        yield
        if self._bar is not None:
            self._bar.start()
