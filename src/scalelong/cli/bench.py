"""`scalelong bench`: speed and memory, each as a ratio to a peer or to the machine's limit in the same run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scalelong.bench.suite import BenchReport


def bench(
    sections: Annotated[list[str] | None, typer.Argument(help="Sections to run; all of them by default.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in which all contestants take turns.")] = 15,
    growth: Annotated[bool, typer.Option("--growth", help="Also how costs grow with each size.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the figures here; other sections of that JSON file stay.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot of --growth here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time training and sampling beside peers and beside the machine's limit.

    Processor time, contestants interleaved, medians with quartiles. Set OMP_NUM_THREADS=1 on a shared machine.
    Sections: digits, cifar10-tiny, limit, update, unet, sampling, compiled, processes, memory, first.

    Example: scalelong bench digits --rounds 30
    """
    from scalelong.bench.growth import save_growth
    from scalelong.bench.suite import bench as run
    from scalelong.bench.suite import joined
    from scalelong.files import FIGURES, check_target, write_text

    if out is not None:
        check_target(out)
    if plot is not None:
        check_target(plot, suffixes=FIGURES)
    report = run(sections or None, rounds, growth or plot is not None)
    if plot is not None:
        save_growth(report.growth, plot)
    if out is not None:
        record = report.to_dict()
        if out.is_file():
            record = joined(json_module.loads(out.read_text(encoding="utf-8")), record)
        write_text(out, json_module.dumps(record, indent=2, ensure_ascii=False) + "\n")
    if json:
        typer.echo(json_module.dumps(report.to_dict(), indent=2, ensure_ascii=False))
    else:
        _print(report)


def _print(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("what", "against", "median", "quartiles", "target", "holds", "note")
    for f in report.figures:
        holds = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[f.holds]
        target = "" if f.target is None else f"{f.sense} {f.target:g}"
        spread = f"{f.value.low:.3f} … {f.value.high:.3f}"
        table.add_row(f.name, f.against, f"{f.value.median:.3f}", spread, target, holds, f.note)
    if report.figures:
        console.print(table)
    for g in report.growth:
        points = ", ".join(f"{size}: {r.median:.2f}" for size, r in zip(g.sizes, g.ratios, strict=True))
        console.print(f"{g.axis}: time grows with power {g.slope:.2f} ({points})", highlight=False)
