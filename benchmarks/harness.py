"""Benchmark harness: interleaved timing, peak memory, figures with their spread, one JSON file and one table.

Every figure is a ratio of two cases that ran in the same rounds of one process, so the machine cancels out.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scalelong.training.memory import PeakMemory

Case = Callable[[], Any]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True)
class Figure:
    """One measured ratio. `sense` is the side of `target` on which it should lie."""

    section: str
    name: str
    against: str  # the denominator
    value: Spread
    target: float | None = None
    sense: str = "≥"
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.target is None:
            return None
        return self.value.median >= self.target if self.sense == "≥" else self.value.median <= self.target


@dataclass(frozen=True)
class Times:
    """CPU seconds of each case in each round."""

    seconds: dict[str, list[float]]

    def ratio(self, numerator: str, denominator: str) -> Spread:
        """Time of `numerator` over time of `denominator`, round by round."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        return Spread.of([a / b for a, b in pairs])

    def speedup(self, fast: str, slow: str) -> Spread:
        """How many times faster `fast` is than `slow`."""
        return self.ratio(slow, fast)

    def milliseconds(self, case: str) -> float:
        return 1e3 * statistics.median(self.seconds[case])


def interleave(cases: Mapping[str, Case], rounds: int, warm_up: int = 2) -> Times:
    """Run every case once per round, starting each round with another one, so that disturbances hit all cases alike.

    CPU time rather than wall time: other programs on the machine stretch wall time.
    """
    names = list(cases)
    for _ in range(warm_up):
        for name in names:
            cases[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = time.process_time()
            cases[name]()
            seconds[name].append(time.process_time() - start)
    return Times(seconds)


def peak_of(case: Case) -> int:
    """Peak bytes that `case` allocates beyond what exists before it runs."""
    with PeakMemory() as memory:
        case()
    return memory.peak


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def write(path: Path, command: str, figures: list[Figure], growth: list[dict[str, Any]]) -> None:
    """Write the figures to `path`. Sections measured earlier on the same machine stay unless they were run again."""
    record: dict[str, Any] = {"command": command, "machine": machine(), "figures": [], "growth": []}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("machine") == record["machine"]:
            measured = {figure.section for figure in figures}
            record["figures"] = [figure for figure in before["figures"] if figure["section"] not in measured]
            record["growth"] = before["growth"]
    record["figures"] += [asdict(figure) | {"holds": figure.holds} for figure in figures]
    record["growth"] = growth or record["growth"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def table(record: dict[str, Any]) -> str:
    """The tables of docs/performance.md."""
    lines = ["| what | compared with | median (quartiles) | target | met |", "|---|---|---|---|---|"]
    for figure in record["figures"]:
        value = figure["value"]
        median, low, high = (f"{value[key]:.2f}" for key in ("median", "low", "high"))
        spread = median if low == high else f"{median} ({low} … {high})"
        target = "" if figure["target"] is None else f"{figure['sense']} {figure['target']:g}"
        met = {True: "yes", False: "**no**", None: ""}[figure["holds"]]
        note = f" ({figure['note']})" if figure["note"] else ""
        lines.append(f"| {figure['name']}{note} | {figure['against']} | {spread} | {target} | {met} |")
    if record["growth"]:
        lines += ["", "| size | slope | range |", "|---|---|---|"]
        lines += [f"| {g['axis']} | {g['slope']:.2f} | {g['sizes'][0]} … {g['sizes'][-1]} |" for g in record["growth"]]
    return "\n".join(lines)
