"""Report runs: one self-contained HTML page, and the figures of the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(__name__, {"scalelong.report.page": ("write_report",)})

if TYPE_CHECKING:
    from scalelong.report.page import write_report as write_report
