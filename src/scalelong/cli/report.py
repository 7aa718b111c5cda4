"""`scalelong report`: runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or the folder of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the one folder, else in the current one.")
    ] = None,
) -> None:
    """Write one self-contained HTML page: curves, oscillation, κ, samples, evaluation cards, configs.

    Examples:

      scalelong report runs/digits-cs-0.7-seed0

      scalelong report runs/none runs/cs runs/ls --out report.html
    """
    from scalelong.report import write_report

    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    typer.echo(f"page: {write_report(runs, page)}")
