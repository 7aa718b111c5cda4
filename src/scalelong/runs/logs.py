"""Reading the logs of a run by columns: fast enough for a million lines, and whatever is in them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.json_lines import blocks, parsed

FIRST_LOOK = 4 << 20  # bytes of a log's end that say what is latest; what was last written before them is old

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One quantity over the steps at which it was written; values may be NaN or infinite, steps never are."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Series:
        keep = np.isfinite(self.values)
        return self if keep.all() else Series(self.steps[keep], self.values[keep])

    @property
    def last(self) -> float | None:
        """The last value that is finite."""
        finite = self.finite().values
        return float(finite[-1]) if len(finite) else None


EMPTY = Series(np.empty(0), np.empty(0))


def read_columns(path: Path) -> dict[str, Series]:
    """The numbers of a log, by name. What is not a number is left out, as is a torn last line."""
    parts: dict[str, list[tuple[Floats, Floats]]] = {}
    for rows in blocks(path):
        for name, part in _columns(rows).items():
            parts.setdefault(name, []).append(part)
    return {
        name: Series(np.concatenate([steps for steps, _ in found]), np.concatenate([values for _, values in found]))
        for name, found in parts.items()
    }


def _columns(rows: list[dict[str, Any]]) -> dict[str, tuple[Floats, Floats]]:
    """Steps and values of every name in a block. Rows with the same names are taken together."""
    own = list(map(tuple, rows))
    alike: dict[tuple[str, ...], list[int]] = {}
    if own.count(own[0]) == len(own):  # as in nearly every block
        alike[own[0]] = list(range(len(own)))
    else:
        for place, names in enumerate(own):
            alike.setdefault(names, []).append(place)
    found: dict[str, list[tuple[npt.NDArray[np.intp], Floats, Floats]]] = {}
    for names, places in alike.items():
        if "step" not in names:
            continue
        group, where = [rows[place] for place in places], np.array(places)
        table = _table(group, names)
        steps = table[names.index("step")]
        for name, values in zip(names, table, strict=True):
            there = np.isfinite(steps) & _were_numbers(values, group, name)
            if name != "step" and there.any():
                found.setdefault(name, []).append((where[there], steps[there], values[there]))
    columns = {}
    for name, pieces in found.items():
        order = np.argsort(np.concatenate([where for where, _, _ in pieces]), kind="stable")
        columns[name] = tuple(np.concatenate([piece[k] for piece in pieces])[order] for k in (1, 2))
    return columns  # type: ignore[return-value]


def _table(group: list[dict[str, Any]], names: tuple[str, ...]) -> Floats:
    """(names, rows) of rows that have the same names in the same order."""
    values = list(chain.from_iterable(map(dict.values, group)))
    if not set(map(type, values)) <= {int, float}:
        values = [_number(value) for value in values]
    try:
        table = np.array(values, dtype=np.float64)
    except OverflowError:  # a whole number beyond floating point
        table = np.array([_number(value) for value in values])
    return np.ascontiguousarray(table.reshape(len(group), len(names)).T)


def _were_numbers(values: Floats, group: list[dict[str, Any]], name: str) -> npt.NDArray[np.bool_]:
    """NaN that was written is kept, NaN that stands for something else is not."""
    there = np.ones(len(values), bool)
    for place in np.flatnonzero(np.isnan(values)):
        there[place] = _is_number(group[place][name])
    return there


class Tail:
    """What a growing log says by now: reads only what is new since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.latest: dict[str, Any] = {}
        self._place = 0
        self._inode: int | None = None

    def look(self) -> dict[str, Any]:
        """Every name with its latest value."""
        try:
            with open(self.path, "rb") as file:
                state = _stat(file)
                if state[0] != self._inode or state[1] < self._place:  # another file, or cut short on a resume
                    self._inode, self._place, self.latest = state[0], max(0, state[1] - FIRST_LOOK), {}
                file.seek(self._place)
                new = file.read()
        except OSError:
            return self.latest
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            row = parsed(line)
            if isinstance(row, dict):
                self.latest |= row
        return self.latest


def last_lines(path: Path, count: int = 8, block: int = 16_384) -> list[str]:
    """The last lines of a text file, for people: no control characters, none too long."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - block))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip()[:300] for line in text.splitlines()]
    return [line for line in lines if line][-count:]


_ABSENT = float("nan")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    if not _is_number(value):
        return _ABSENT
    try:
        return float(value)
    except OverflowError:  # a whole number beyond floating point
        return _ABSENT


def _stat(file: Any) -> tuple[int, int]:
    import os

    state = os.fstat(file.fileno())
    return state.st_ino, state.st_size
