"""Interleaved, repeated timing. Every figure is a ratio of two things that ran in the same rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scalelong.bench.remote import RemoteCase

Case = Callable[[], Any]


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)


@dataclass(frozen=True)
class Times:
    """Seconds of processor time of each case in each round."""

    seconds: dict[str, list[float]]

    def of(self, case: str) -> Spread:
        return Spread.of(self.seconds[case])

    def speedup(self, fast: str, slow: str) -> Spread:
        """How many times faster `fast` is than `slow`, round by round."""
        return Spread.of([b / a for a, b in zip(self.seconds[fast], self.seconds[slow], strict=True)])

    def share(self, part: str, whole: str) -> Spread:
        """`part`'s time as a share of `whole`'s, round by round."""
        return self.speedup(whole, part)


def interleave(cases: Mapping[str, Case], rounds: int, warm_up: int = 2) -> Times:
    """Run every case once a round, each round beginning with another, so that a disturbance meets all alike.

    Processor time, not the clock: programs of others on the machine stretch the clock.
    """
    names = list(cases)
    for _ in range(warm_up):
        for name in names:
            cases[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds):
        turn = k % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(_seconds(cases[name]))
    return Times(seconds)


def _seconds(case: Case) -> float:
    if isinstance(case, RemoteCase):  # which has a clock of its own
        return case()
    start = time.process_time()
    case()
    return time.process_time() - start
