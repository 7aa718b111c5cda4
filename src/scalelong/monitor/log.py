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
    """Append snapshots to a file. When it holds `keep` of them, it is `thinned`: older times become ever coarser."""

    def __init__(self, path: Path | str | None, keep: int) -> None:
        self.path, self.keep, self.count = None if path is None else Path(path), keep, 0

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
        self._rewrite(header, entries)
        return entries

    def write(self, entry: Entry) -> None:
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(entry))
        self.count += 1
        if self.count >= self.keep:
            header, entries = _read(self.path)
            self._rewrite(header or {}, thinned(entries, self.keep))

    def _rewrite(self, header: Entry, entries: list[Entry]) -> None:
        if self.path is not None:
            write_text(self.path, "".join(map(_line, [header, *entries])))
            self.count = len(entries)


def thinned(entries: list[Entry], keep: int) -> list[Entry]:
    """Drop every second entry of the older half; those with alarms only if too many are left."""
    middle = len(entries) // 2
    older, newer = entries[:middle], entries[middle:]
    raised = [any("text" in alarm for alarm in entry.get("alarms", [])) for entry in older]
    kept = [entry for k, entry in enumerate(older) if k % 2 == 0 or raised[k]]
    return (kept if len(kept) + len(newer) <= 7 * keep // 8 else older[::2]) + newer


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
