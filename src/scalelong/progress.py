"""Progress of anything that takes time: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield `items` and show the progress on standard error."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if sys.stderr.isatty() and find_spec("rich") is not None:  # rich is not part of the base install
        yield from _bar(items, description, total)
    else:
        yield from _lines(items, description, total)


def _bar(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, emoji=False), transient=True) as progress:
        yield from progress.track(items, total=total, description=description)


def _lines(items: Iterable[T], description: str, total: int | None, every: float = 10.0) -> Iterator[T]:
    """Print one line every `every` seconds, so nothing for what is done sooner."""
    printed = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - printed >= every:
            printed = now
            of = f" of {total}" if total is not None else ""
            print(f"{description}: {done}{of}", file=sys.stderr, flush=True)
        yield item
