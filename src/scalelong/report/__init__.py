"""One self-contained HTML page from run folders."""

from __future__ import annotations

from scalelong.report.page import write_report

__all__ = ["write_report"]
