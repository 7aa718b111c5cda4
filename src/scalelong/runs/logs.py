"""Logs of a run: one JSON object per line, appended while training and read as NumPy arrays."""

import json
import math
import os
from array import array
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scalelong.errors import RunError
from scalelong.files import json_line_blocks, parse_json_line
from scalelong.monitor.log import Entry, StabilityLog, lookup, read_stability

if TYPE_CHECKING:
    from scalelong.monitor.curves import NormCurves

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
                end = len(content)
                while end:
                    start = content.rfind(b"\n", 0, end - 1) + 1
                    last = _step_until(step, content[start:end])
                    if last is not None:
                        break
                    end = start
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


def _step_until(limit: int, line: bytes) -> int | None:
    """Return the step of a line (0 for a header), or None if it is above the limit, torn, or not of a log."""
    try:
        step = json.loads(line).get("step", 0)
        return int(step) if line.endswith(b"\n") and step <= limit else None
    except (ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        return None


@dataclass(frozen=True)
class Series:
    """One quantity over the steps at which it was logged. Values may be NaN or infinite, steps are finite."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> "Series":
        """The series without NaN and infinite values."""
        keep = np.isfinite(self.values)
        return self if keep.all() else Series(self.steps[keep], self.values[keep])

    @property
    def last(self) -> float | None:
        """The last finite value."""
        finite = self.finite().values
        return float(finite[-1]) if len(finite) else None

    @property
    def final(self) -> float | None:
        """The last value, None if it is not finite."""
        return float(self.values[-1]) if len(self) and np.isfinite(self.values[-1]) else None


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


# -------------------------------------------------------------------------------------- stability.jsonl


@dataclass(frozen=True)
class StabilityArrays:
    """A stability log, one row per evenly spaced snapshot. Long skips count from 1, the outermost. Missing: NaN."""

    log: StabilityLog

    @property
    def header(self) -> dict[str, Any]:
        return self.log.header

    @cached_property
    def entries(self) -> list[Entry]:
        """Snapshots at even spacing, so that times that the log keeps more closely do not count more."""
        return self.log.evenly_spaced()

    @cached_property
    def steps(self) -> Floats:
        return np.array([float(entry["step"]) for entry in self.entries])

    @property
    def n(self) -> int:
        """The number of long skips."""
        skips = self.header.get("skips")
        return len(skips) if isinstance(skips, list) else 0

    @property
    def blocks(self) -> list[str]:
        blocks = self.header.get("blocks")
        return [str(block) for block in blocks] if isinstance(blocks, list) else []

    def matrix(self, *path: str, width: int | None = None) -> Floats | None:
        """Return (snapshots, width) of a list in every entry, `matrix("probe", "backbone")`; None without numbers."""
        width = self.n if width is None else width
        rows = np.full((len(self.entries), width), np.nan)
        for k, entry in enumerate(self.entries):
            values = lookup(entry, *path)
            if isinstance(values, list) and len(values) == width:
                rows[k] = [value if _is_number(value) else np.nan for value in values]
        return rows if width and np.isfinite(rows).any() else None

    def series(self, *path: str) -> Series | None:
        """Return one number of every entry: `series("grad", "total")`. None if it has no number."""
        found = (lookup(entry, *path) for entry in self.entries)
        values = np.array([value if _is_number(value) else np.nan for value in found], dtype=float)
        return Series(self.steps, values) if len(values) and np.isfinite(values).any() else None

    def late(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the snapshots in the second half of training."""
        return self.steps >= self.steps[-1] / 2 if len(self.steps) else np.zeros(0, bool)

    def norms(self, *path: str, width: int | None = None) -> "NormCurves[Floats] | None":
        """Return size, growth and absolute oscillation: `norms("train", "backbone")`. None without numbers."""
        import torch

        from scalelong.monitor.curves import NormCurves, norm_curves

        rows = self.matrix(*path, width=width)
        if rows is None:
            return None
        curves = norm_curves(torch.from_numpy(self.steps), torch.from_numpy(rows))
        return NormCurves(*(curve.numpy() for curve in curves))

    def oscillation(self, *path: str, width: int | None = None) -> Floats | None:
        """Return the relative oscillation over the second half, (width,): `oscillation("probe", "backbone")`.

        NaN for fewer than two jumps; None if that holds for all columns.
        """
        jumps = self.matrix("jump", *path, width=width)
        return None if jumps is None else _oscillation(jumps[self.late()])

    def gradient_oscillation(self) -> float | None:
        """Return the relative oscillation of the total gradient norm, on training batches."""
        jumps = self.series("jump", "grad", "total")
        value = None if jumps is None else _oscillation(jumps.values[self.late(), None])
        return None if value is None else float(value[0])

    def alarms(self) -> list[str]:
        """Return the text of every alarm."""
        return [str(alarm["text"]) for alarm in self.log.alarms()]


def read_stability_arrays(path: Path) -> StabilityArrays | None:
    """Read a stability.jsonl; None if it is missing or has no valid header."""
    try:
        return StabilityArrays(read_stability(path))
    except RunError:
        return None


def _oscillation(jumps: Floats) -> Floats | None:
    import torch

    from scalelong.monitor.snapshot import spread

    spreads: Floats = spread(torch.from_numpy(jumps)).numpy()
    return spreads if np.isfinite(spreads).any() else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
