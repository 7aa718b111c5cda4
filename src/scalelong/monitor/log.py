"""stability.jsonl: a header line and one JSON object per snapshot, of bounded size. docs/monitor.md has the format."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalelong.errors import RunError
from scalelong.files import json_line_blocks, write_text

FORMAT = 1
# Significant digits in the file. Jumps keep more: a resumed run computes its oscillation from them, and must get the
# three digits that the uninterrupted run gets from exact jumps.
DIGITS, DIGITS_OF = 5, {"jump": 9, "oscillation": 3}
Entry = dict[str, Any]


@dataclass(frozen=True)
class StabilityLog:
    """The content of a stability.jsonl. `header["skips"]` and `header["blocks"]` label the lists in an entry."""

    header: Entry
    entries: list[Entry] = field(repr=False)

    def series(self, *path: str, i: int | None = None) -> tuple[list[int], list[float | None]]:
        """Return (steps, values) of one quantity: `series("probe", "backbone", i=6)`, `series("grad", "total")`.

        i counts long skips from 1 (outermost). For lists over blocks, use `header["blocks"].index(…) + 1`.
        """
        keys: tuple[str | int, ...] = path if i is None else (*path, i)
        return [entry["step"] for entry in self.entries], [lookup(entry, *keys) for entry in self.entries]

    def evenly_spaced(self) -> list[Entry]:
        """Return the snapshots at the spacing of the oldest ones; a log that was never thinned has one spacing."""
        spacing = self.header.get("spacing")
        if type(spacing) is not int or spacing < 1:
            return self.entries
        return [entry for entry in self.entries if entry["step"] % spacing == 0]

    def alarms(self) -> list[Entry]:
        """Return every alarm at the snapshot that raised it."""
        listed = [entry["alarms"] for entry in self.entries if isinstance(entry.get("alarms"), list)]
        return [alarm for alarms in listed for alarm in alarms if isinstance(alarm, dict) and "text" in alarm]


def read_stability(path: Path | str) -> StabilityLog:
    """Read a stability.jsonl. Damaged lines, such as a partly written last one, are ignored."""
    header, entries = _read(Path(path))
    if header is None or header["format"] != FORMAT:
        raise RunError(f"{path} must be a stability log with a header line of format {FORMAT}, got {header!r:.80}")
    return StabilityLog(header, list(filter(_has_step, entries)))


class LogWriter:
    """Append snapshots to a file. When it holds `keep` of them, it is `thinned`."""

    def __init__(self, path: Path | str | None, keep: int, recent: int = 0) -> None:
        self.path, self.keep, self.count = None if path is None else Path(path), keep, 0
        self.recent = min(max(recent, keep // 4), keep // 2)

    def begin(self, header: Entry, step: int) -> list[Entry]:
        """Continue an existing file of the same network, dropping entries from `step` on. Returns the others."""
        entries: list[Entry] = []
        if self.path is not None and self.path.exists():
            former, entries = _read(self.path)
            if former is None and entries:
                raise RunError(f"{self.path} is not a stability log; choose another out=")
            for key in ("format", "network", "skips", "blocks", "times"):
                if former is not None and former.get(key) != header.get(key):
                    change = f"{key} was {former.get(key)!r}, is {header.get(key)!r}; choose another out="
                    raise RunError(f"{self.path} was written for another network or monitor: {change}")
            entries = [entry for entry in entries if _has_step(entry) and entry["step"] < step]
            if entries and former is not None and "spacing" in former:
                header = {**header, "spacing": former["spacing"]}
        self._rewrite(header, entries)
        return entries

    def write(self, entry: Entry) -> None:
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(entry))
        self.count += 1
        if self.count >= self.keep:
            found, entries = _read(self.path)
            header = found or {}
            spacing = header.get("spacing", 2 * header.get("every", 1))  # every second snapshot has jumps
            spacing, left = thinned(list(filter(_has_step, entries)), self.keep, self.recent, spacing)
            self._rewrite({**header, "spacing": spacing}, left)

    def _rewrite(self, header: Entry, entries: list[Entry]) -> None:
        if self.path is not None:
            write_text(self.path, "".join(map(_line, [header, *entries])))
            self.count = len(entries)


def thinned(entries: list[Entry], keep: int, recent: int, spacing: int) -> tuple[int, list[Entry]]:
    """Keep the `recent` newest entries, and of the others those at multiples of a spacing of steps, so that the whole
    run is covered evenly; the spacing doubles until they are few enough. Entries that raised an alarm stay, up to an
    eighth of `keep`.
    """
    older, newest = entries[:-recent], entries[-recent:]
    while sum(entry["step"] % spacing == 0 for entry in older) > keep - recent - keep // 4:
        spacing *= 2
    raised = [e for e in older if e["step"] % spacing and any("text" in alarm for alarm in e.get("alarms", []))]
    steps = {entry["step"] for entry in raised[: keep // 8]}
    return spacing, [e for e in older if e["step"] % spacing == 0 or e["step"] in steps] + newest


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Round every float of an entry to significant digits. Floats that are not finite become None."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")  # the largest floats round to infinity
        return short if math.isfinite(short) else None
    if isinstance(value, dict):
        return {key: rounded(item, DIGITS_OF.get(key, digits)) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


def lookup(entry: Entry, *path: str | int) -> Any:
    """Return a value inside an entry, or None: strings are keys, integers count list items from 1."""
    value: Any = entry
    try:
        for key in path:
            value = value[key - 1 if isinstance(key, int) else key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def _read(path: Path) -> tuple[Entry | None, list[Entry]]:
    """Return the last header line, and all other lines that are JSON objects."""
    if not path.is_file():
        raise RunError(f"{path} does not exist or is not a file")
    try:
        lines = [line for block in json_line_blocks(path) for line in block]
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    headers = [line for line in lines if "format" in line]
    return headers[-1] if headers else None, [line for line in lines if "format" not in line]


def _has_step(entry: Entry) -> bool:
    return type(entry.get("step")) in (int, float) and abs(entry["step"]) < 1e300


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
