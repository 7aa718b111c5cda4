"""stability.jsonl as NumPy arrays: one row per snapshot, one column per long skip or block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.errors import RunError
from scalelong.monitor.log import StabilityLog, lookup, read_stability
from scalelong.runs.logs import Floats, Series


@dataclass(frozen=True)
class StabilityArrays:
    """Arrays of a stability log. Long skips count from 1, the outermost. Missing values are NaN."""

    log: StabilityLog

    @property
    def header(self) -> dict[str, Any]:
        return self.log.header

    @cached_property
    def steps(self) -> Floats:
        return np.array([float(entry["step"]) for entry in self.log.entries])

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
        rows = np.full((len(self.log.entries), width), np.nan)
        for k, entry in enumerate(self.log.entries):
            values = lookup(entry, *path)
            if isinstance(values, list) and len(values) == width:
                rows[k] = [value if _is_number(value) else np.nan for value in values]
        return rows if width and np.isfinite(rows).any() else None

    def series(self, *path: str) -> Series | None:
        """Return one number of every entry: `series("grad", "total")`. None if it has no number."""
        numbers = [value if _is_number(value) else np.nan for value in self.log.series(*path)[1]]
        values = np.array(numbers, dtype=float)
        return Series(self.steps, values) if len(values) and np.isfinite(values).any() else None

    def late(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the snapshots in the second half of training."""
        return self.steps >= self.steps[-1] / 2 if len(self.steps) else np.zeros(0, bool)

    def oscillation(self, *path: str, width: int | None = None) -> Floats | None:
        """Return the oscillation over the second half of training, (width,): `oscillation("probe", "backbone")`.

        NaN for fewer than two jumps; None if that holds for all columns.
        """
        jumps = self.matrix("jump", *path, width=width)
        return None if jumps is None else _oscillation(jumps[self.late()])

    def gradient_oscillation(self) -> float | None:
        """Return the oscillation of the total gradient norm, on training batches."""
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
