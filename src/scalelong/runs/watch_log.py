"""The monitor's stability.jsonl as arrays: looks down, long skips or blocks across. docs/monitor.md has the format."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.files import json_line_blocks
from scalelong.runs.logs import Floats, Series

MOST = 4096  # looks read; the monitor keeps fewer


@dataclass(frozen=True)
class WatchLog:
    """What the monitor saw. Long skips are counted from 1, the outermost; a figure that is not there is NaN."""

    header: dict[str, Any]
    looks: list[dict[str, Any]] = field(repr=False)

    @cached_property
    def steps(self) -> Floats:
        return np.array([float(look["step"]) for look in self.looks])

    @property
    def n(self) -> int:
        """Long skips."""
        skips = self.header.get("skips")
        return len(skips) if isinstance(skips, list) else 0

    @property
    def blocks(self) -> list[str]:
        blocks = self.header.get("blocks")
        return [str(block) for block in blocks] if isinstance(blocks, list) else []

    @property
    def times(self) -> list[float]:
        """The edges of the timestep bins."""
        edges = self.header.get("times")
        return [float(edge) for edge in edges if _is_number(edge)] if isinstance(edges, list) else []

    def matrix(self, *path: str, width: int | None = None) -> Floats | None:
        """(looks, width) of a list in every look: `matrix("probe", "backbone")`. None where no look has a number."""
        width = self.n if width is None else width
        rows = np.full((len(self.looks), width), np.nan)
        for k, look in enumerate(self.looks):
            found = _at(look, path)
            if isinstance(found, list) and len(found) == width:
                rows[k] = [value if _is_number(value) else np.nan for value in found]
        return rows if width and np.isfinite(rows).any() else None

    def series(self, *path: str) -> Series | None:
        """One number in every look: `series("grad", "total")`."""
        values = np.array([v if _is_number(v := _at(look, path)) else np.nan for look in self.looks], dtype=float)
        return Series(self.steps, values) if len(values) and np.isfinite(values).any() else None

    def late(self) -> npt.NDArray[np.bool_]:
        """The looks of the second half of training."""
        return self.steps >= self.steps[-1] / 2 if len(self.steps) else np.zeros(0, bool)

    def oscillation(self, *path: str, width: int | None = None) -> Floats | None:
        """The standard deviation of one-step jumps of log(norm) over the second half, (width,), as
        `oscillation("probe", "backbone")`; NaN for fewer than two jumps.
        """
        jumps = self.matrix("jump", *path, width=width)
        if jumps is None:
            return None
        late = jumps[self.late()]
        enough = np.isfinite(late).sum(0) >= 2
        spreads = np.full(late.shape[1], np.nan)
        spreads[enough] = np.nanstd(late[:, enough], axis=0)
        return spreads if enough.any() else None

    def gradient_oscillation(self) -> float | None:
        """The same of the whole gradient's norm, on training batches."""
        jumps = self.series("jump", "grad", "total")
        if jumps is None:
            return None
        late = Series(jumps.steps[self.late()], jumps.values[self.late()]).finite().values
        return float(late.std()) if len(late) >= 2 else None

    def alarms(self) -> list[str]:
        """Every alarm in words, at the look where it was raised."""
        listed = [look.get("alarms") for look in self.looks]
        raised = [alarm for alarms in listed if isinstance(alarms, list) for alarm in alarms if isinstance(alarm, dict)]
        return [str(alarm["text"]) for alarm in raised if "text" in alarm]


def read_watch_log(path: Path) -> WatchLog | None:
    """What a stability.jsonl holds; None where there is none or it has no header of this format."""
    header: dict[str, Any] | None = None
    looks: list[dict[str, Any]] = []
    for rows in json_line_blocks(path):
        for row in rows:
            if "format" in row:
                header = row
            elif _is_number(row.get("step")):
                looks.append(row)
    if header is None or header.get("format") != 1:
        return None
    return WatchLog(header, looks[-MOST:])


def _at(look: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = look
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
