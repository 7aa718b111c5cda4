"""Run folders: their config, logs and trained network, for everything that writes or reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.runs.config": ("Config",),
        "scalelong.runs.generate": ("Request",),
        "scalelong.runs.run": ("Run", "find_runs", "load_run"),
    },
)

if TYPE_CHECKING:
    from scalelong.runs.config import Config as Config
    from scalelong.runs.generate import Request as Request
    from scalelong.runs.run import Run as Run
    from scalelong.runs.run import find_runs as find_runs
    from scalelong.runs.run import load_run as load_run
