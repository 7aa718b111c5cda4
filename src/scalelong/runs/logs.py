"""Logs of a run: one JSON object per line, appended while training and read by columns."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import defaultdict
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.files import json_line_blocks, parse_json_line

Floats = npt.NDArray[np.float64]
TAIL = 4 << 20  # bytes of a log's end that `Tail` reads first; older values are not the latest ones


class JsonLines:
    """Appends to a log. A step is never logged twice, and a line that a crash cut short does no harm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def keep_until(self, step: int) -> int:
        """Drop a torn last line and all lines of later steps. Returns the last step left. Reads from the end only."""
        if not self.path.exists() or not self.path.stat().st_size:
            return 0
        with open(self.path, "r+b") as file:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end, last = len(content), None
                while end and last is None:
                    start = content.rfind(b"\n", 0, end - 1) + 1
                    last = _step_of(content[start:end])
                    if last is None or last > step:
                        end, last = start, None
            file.truncate(end)
        return last or 0

    def write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (stays open until close())
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush to disk: a checkpoint must never be ahead of its log."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            try:
                self.sync()
            finally:
                file, self._file = self._file, None
                file.close()


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, 0 for a header, None if the line is torn or not of a log."""
    try:
        return int(json.loads(line).get("step", 0)) if line.endswith(b"\n") else None
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log without a torn last line."""
    return [entry for rows in json_line_blocks(path) for entry in rows]


@dataclass(frozen=True)
class Series:
    """One quantity over the steps at which it was logged. Values may be NaN or infinite, steps are finite."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Series:
        """The series without NaN and infinite values."""
        keep = np.isfinite(self.values)
        return self if keep.all() else Series(self.steps[keep], self.values[keep])

    @property
    def last(self) -> float | None:
        """The last finite value."""
        finite = self.finite().values
        return float(finite[-1]) if len(finite) else None


EMPTY = Series(np.empty(0), np.empty(0))


def read_columns(path: Path) -> dict[str, Series]:
    """Return the numbers of a log by name. Other values and torn lines are left out."""
    steps: dict[str, array[float]] = defaultdict(lambda: array("d"))
    values: dict[str, array[float]] = defaultdict(lambda: array("d"))
    for rows in json_line_blocks(path):
        for row in rows:
            step = _number(row.get("step"))
            if step is None or not math.isfinite(step):
                continue
            for name, value in row.items():
                if name != "step" and (number := _number(value)) is not None:
                    steps[name].append(step)
                    values[name].append(number)
    return {name: Series(np.array(steps[name]), np.array(values[name])) for name in steps}


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    try:
        return float(value) if type(value) is int else None
    except OverflowError:  # an integer that no float can hold
        return None


class Tail:
    """The latest values of a growing log. Each call of `read` reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, Any] = {}
        self._position = 0
        self._inode: int | None = None

    def read(self) -> dict[str, Any]:
        """Return every name with its latest value."""
        try:
            with open(self.path, "rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode or state.st_size < self._position:  # replaced, or cut by a resume
                    self._inode, self._position, self.latest = state.st_ino, max(0, state.st_size - TAIL), {}
                file.seek(self._position)
                new = file.read()
        except OSError:
            return self.latest
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            row = parse_json_line(line)
            if isinstance(row, dict):
                self.latest |= row
        return self.latest


def last_lines(path: Path, count: int = 8, block: int = 16_384) -> list[str]:
    """Return the last lines of a text file for display: printable characters only, at most 300 per line."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - block))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip()[:300] for line in text.splitlines()]
    return [line for line in lines if line][-count:]
