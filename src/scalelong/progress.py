"""Progress of anything that takes time: one line per task in a terminal, plain lines every ten seconds elsewhere.

In a terminal, step and time left are always visible; name, values and bar share the rest of the width.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text

T = TypeVar("T")
EVERY = 10.0  # seconds between two plain lines
LONGEST_BAR, SHORTEST_BAR, SHORTEST_NAME = 24, 6, 12  # columns


def duration(seconds: float) -> str:
    """65 → 1:05, 3725 → 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def track(
    items: Iterable[T], description: str, total: int | None = None, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Yield `items` and show the progress on standard error. An item counts as `size` of `total`."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Tracker(description, total) as tracker:
        for item in items:
            yield item
            tracker.advance(size(item))


class Tracker:
    """The progress of one task. Use it as a context manager and call `advance` after each part."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total, self.done = description, total, 0
        self._bar: Progress | None = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> Tracker:
        if sys.stderr.isatty() and find_spec("rich") is not None:  # rich is not part of the base install
            self._bar = bars(transient=True)
            self._bar.add_task(self.description, total=self.total, values=())
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(self._bar.tasks[0].id, completed=self.done)
        elif (now := time.monotonic()) - self._printed >= EVERY:
            self._printed, rest = now, ""
            if self.total is not None:
                left = max(0, self.total - self.done) * (now - self._started) / self.done
                rest = f" of {self.total}, {duration(left)} left"
            print(f"{self.description}: {self.done}{rest}", file=sys.stderr, flush=True)


def bars(**options: Any) -> Progress:
    """Return rich's display with one line per task that fits the terminal.

    Fields of a task: `values`, texts with the most important first; optionally `left`, a text instead of the time left,
    and `mark`, a (character, style).
    """
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    class Line(ProgressColumn):
        def render(self, task: Task) -> Text:
            longest = max(len(other.description) for other in display.tasks if other.visible)
            return _line(task, display.console.width, longest)

    display = Progress(Line(), console=Console(stderr=True, emoji=False), **options)
    return display


def _line(task: Task, width: int, longest_name: int) -> Text:
    from rich.text import Text

    total = "?" if task.total is None else f"{task.total:.0f}"
    left = task.fields.get("left")
    if left is None and task.total is not None:
        left = "" if task.time_remaining is None else f"{duration(task.time_remaining)} left"
    counts = f" {task.completed:{len(total)}.0f}/{total} {left or '':>9}"
    mark, style = task.fields.get("mark") or ("", "")
    head = f"{mark} " if mark else ""
    fitted = fit(width - len(head) - len(counts), task.description, task.fields["values"], longest_name)
    filled = round(fitted.bar * min(1.0, task.completed / task.total)) if task.total else 0
    text = Text(head, style, no_wrap=True, overflow="crop").append(fitted.name, "default")
    if fitted.bar:
        text.append(" ").append("━" * filled, "bar.complete").append("━" * (fitted.bar - filled), "bar.back")
    return text.append(counts, "default").append("".join(f"  {value}" for value in fitted.values), "dim")


@dataclass(frozen=True)
class Fitted:
    """What fits beside step and time left: the name, padded or cut in the middle, a bar's columns, and values."""

    name: str
    bar: int
    values: tuple[str, ...]


def fit(columns: int, name: str, values: Sequence[str], longest_name: int) -> Fitted:
    """Share `columns` among the name, the values and the bar, in this order."""
    first = len(values[0]) + 2 if values else 0
    room = max(1, min(longest_name, max(SHORTEST_NAME, columns - first)))
    if len(name) > room:
        tail = (room - 1) // 2
        name = name[: room - 1 - tail] + "…" + (name[-tail:] if tail else "")
    columns -= room
    kept = 0
    while kept < len(values) and len(values[kept]) + 2 <= columns:
        columns -= len(values[kept]) + 2
        kept += 1
    bar = min(LONGEST_BAR, columns - 1)
    return Fitted(name.ljust(room), bar if bar >= SHORTEST_BAR else 0, tuple(values[:kept]))
