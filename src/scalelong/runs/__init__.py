"""Run folders: their config, logs and trained network, for everything that writes or reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.runs.config": ("Config", "Facts", "override"),
        "scalelong.runs.generate": ("Request", "generate"),
        "scalelong.runs.logs": ("Series",),
        "scalelong.runs.run": ("Run", "build_network", "find_runs", "load_run"),
    },
)

if TYPE_CHECKING:
    from scalelong.runs.config import Config as Config
    from scalelong.runs.config import Facts as Facts
    from scalelong.runs.config import override as override
    from scalelong.runs.generate import Request as Request
    from scalelong.runs.generate import generate as generate
    from scalelong.runs.logs import Series as Series
    from scalelong.runs.run import Run as Run
    from scalelong.runs.run import build_network as build_network
    from scalelong.runs.run import find_runs as find_runs
    from scalelong.runs.run import load_run as load_run
