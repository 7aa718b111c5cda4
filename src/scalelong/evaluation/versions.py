"""What a card says about when and with what it was made."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib import metadata

from scalelong.version import __version__


def versions() -> dict[str, str]:
    """The versions of what a figure depends on."""
    found = {"scalelong": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pillow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
