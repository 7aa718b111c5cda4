"""Readers of the published files of the datasets that have a name here."""

from __future__ import annotations

from pathlib import Path


def find(folder: Path, pattern: str, depth: int = 2) -> list[Path]:
    """Files of that name in `folder` or up to `depth` folders below: the nearest level that has any, sorted."""
    for level in range(depth + 1):
        found = sorted(folder.glob("*/" * level + pattern))
        if found:
            return found
    return []
