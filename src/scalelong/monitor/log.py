"""stability.jsonl: one JSON object a look, behind a header line, of bounded size; docs/monitor.md has the format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelong.errors import ScaleLongError
from scalelong.files import atomic_file

FORMAT = 1
Entry = dict[str, Any]


@dataclass(frozen=True)
class Stability:
    """What a stability.jsonl holds. `header["skips"]` and `header["blocks"]` name what the lists of an entry are of."""

    header: Entry
    entries: list[Entry]

    def series(self, *path: str, i: int | None = None) -> tuple[list[int], list[float | None]]:
        """(steps, values) of one figure: `series("probe", "backbone", i=6)`, `series("grad", "total")`.

        i counts long skips from 1 (outermost); for lists over blocks use `header["blocks"].index(…) + 1`.
        """
        steps, values = [], []
        for entry in self.entries:
            value: Any = entry
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if i is not None:
                value = value[i - 1] if isinstance(value, list) else None
            steps.append(entry["step"])
            values.append(value)
        return steps, values

    def alarms(self) -> list[Entry]:
        """Every alarm at the look where it was raised."""
        return [alarm for entry in self.entries for alarm in entry.get("alarms", []) if "text" in alarm]


def read_stability(path: Path | str) -> Stability:
    """Read a stability.jsonl; a torn last line is left out."""
    lines = _lines(Path(path))
    headers = [line for line in lines if "format" in line]
    if not headers:
        raise ScaleLongError(f"{path} is not a stability log: it has no header line")
    if headers[-1]["format"] != FORMAT:
        raise ScaleLongError(f"{path} has format {headers[-1]['format']}; this version reads {FORMAT}")
    return Stability(headers[-1], [line for line in lines if "format" not in line])


class LogWriter:
    """Appends looks to a file. At `keep` looks every second one of the older half is dropped, and so on.

    So the newest half is always whole, older times are seen ever more coarsely, and the file never has more than
    `keep` looks. Looks that raised an alarm are dropped last.
    """

    def __init__(self, path: Path | str | None, keep: int) -> None:
        self.path = None if path is None else Path(path)
        self.keep = keep
        self.count = 0

    def begin(self, header: Entry, step: int) -> list[Entry]:
        """Go on with a file of the same network from `step` on; what it says of that step and later is dropped."""
        if self.path is None:
            return []
        entries: list[Entry] = []
        if self.path.exists():
            lines = _lines(self.path)
            former = next((line for line in reversed(lines) if "format" in line), None)
            if lines and former is None:
                raise ScaleLongError(f"{self.path} is not a stability log; give another out=")
            if former is not None:
                _same(former, header, self.path)
            entries = [line for line in lines if "format" not in line and line.get("step", 0) < step]
        self._rewrite([header, *entries])
        self.count = len(entries)
        return entries

    def write(self, entry: Entry) -> None:
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:  # for each look anew: nothing to be left open
            file.write(_line(entry))
        self.count += 1
        if self.count >= self.keep:
            lines = _lines(self.path)
            entries = thinned([line for line in lines if "format" not in line], self.keep)
            self._rewrite([line for line in lines if "format" in line][-1:] + entries)
            self.count = len(entries)

    def _rewrite(self, lines: Iterable[Entry]) -> None:
        assert self.path is not None
        with atomic_file(self.path) as aside:
            aside.write_text("".join(map(_line, lines)), encoding="utf-8")


def thinned(entries: list[Entry], keep: int) -> list[Entry]:
    """Every second entry of the older half is dropped; those with alarms only where the rest is not enough."""
    middle = len(entries) // 2
    older, newer = entries[:middle], entries[middle:]
    plain = [entry for k, entry in enumerate(older) if k % 2 == 0 or _raised(entry)]
    if len(plain) + len(newer) > 7 * keep // 8:
        plain = older[::2]
    return plain + newer


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Numbers for JSON: so many significant digits, None for what is not finite."""
    return [number(value, digits) for value in values]


def number(value: float | None, digits: int = 5) -> float | None:
    """A number with so many significant digits, None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    kept = float(f"{value:.{digits}g}")
    return kept if math.isfinite(kept) else None  # the greatest floats round up to infinity


def _raised(entry: Entry) -> bool:
    return any("text" in alarm for alarm in entry.get("alarms", []))


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _lines(path: Path) -> list[Entry]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ScaleLongError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _same(former: Entry, header: Entry, path: Path) -> None:
    for key in ("format", "network", "skips", "blocks", "times"):
        if former.get(key) != header.get(key):
            raise ScaleLongError(
                f"{path} is the log of another network or monitor ({key} differs); give another out=, or remove it"
            )
