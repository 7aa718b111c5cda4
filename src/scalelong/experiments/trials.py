"""The finished trials of a study in a file, so that the same command resumes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalelong.files import json_line_blocks
from scalelong.runs.logs import JsonLines


class TrialFile:
    """Results of trials by key, one JSON line each. Several processes may append at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
            with open(path, "ab") as file:  # close a line that a kill cut short, so that the next one starts anew
                file.write(b"\n")
        rows = (row for block in json_line_blocks(path) for row in block)
        self.finished: dict[str, Any] = {
            row["key"]: row["result"] for row in rows if isinstance(row.get("key"), str) and "result" in row
        }

    def run(self, key: str, trial: Callable[[], Any]) -> Any:
        """Return the result of an earlier call, or run the trial and append its JSON-ready result."""
        if key not in self.finished:
            self.finished[key] = trial()
            log = JsonLines(self.path)  # appends a line in one write: processes do not mix theirs
            log.write({"key": key, "result": self.finished[key]})
            log.close()
        return self.finished[key]
