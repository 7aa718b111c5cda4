"""`scalelong compare`: variants side by side under equal conditions, with intervals and a page."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scalelong.experiments.compare import Result

RUNS, MEASURES = "The runs", "What is measured"


def compare(
    preset: Annotated[str, typer.Argument(help="A preset; `scalelong presets` lists them.")] = "digits",
    scalings: Annotated[
        str,
        typer.Option(
            help="What is compared, the baseline first: none, uniform, cs, cs-reverse, ls, stable, rezero; "
            "cs:0.5 gives κ.",
            rich_help_panel=RUNS,
        ),
    ] = "none,uniform,cs,ls",
    seeds: Annotated[
        str, typer.Option(help="How many seeds, or the seeds themselves: 4,7.", rich_help_panel=RUNS)
    ] = "3",
    steps: Annotated[int | None, typer.Option(help="Steps of every run.", rich_help_panel=RUNS)] = None,
    kappa: Annotated[float | None, typer.Option(help="κ of cs and cs-reverse.", rich_help_panel=RUNS)] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the runs: train.lr=1e-3, …", rich_help_panel=RUNS)
    ] = None,
    distance: Annotated[
        str,
        typer.Option(
            help="Fréchet distance by: pixels (8×8 means, cheap, not FID), inception (FID), none.",
            rich_help_panel=MEASURES,
        ),
    ] = "pixels",
    samples: Annotated[int, typer.Option(help="How many samples for it.", rich_help_panel=MEASURES)] = 256,
    out: Annotated[Path | None, typer.Option(help="Where everything goes; by default runs/compare-PRESET.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; by default one a GPU, else one a core.")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write OUT/report.html at the end.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print comparison.json instead of the table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train variants with the same data order, noise and initial weights, and compare them over seeds.

    The same command again goes on where it stopped; Ctrl-C lets every run write a checkpoint.

    Examples:

      scalelong compare

      scalelong compare cifar10-tiny --scalings none,cs:0.5,cs:0.7,ls --seeds 3 --steps 5000

      scalelong compare digits --seeds 1 --set model.depth=24 --out runs/deep
    """
    from scalelong.experiments.compare import run_comparison
    from scalelong.experiments.distance import DistanceSpec
    from scalelong.experiments.plan import parse_seeds, scaling_variants

    variants = scaling_variants(preset, scalings, kappa=kappa, steps=steps, settings=settings or [])
    chosen = None if distance == "none" else DistanceSpec(distance, samples)
    folder = out or Path("runs") / f"compare-{preset}"
    result = run_comparison(variants, parse_seeds(seeds), folder, distance=chosen, jobs=jobs, quiet=quiet)
    if result.signal is not None:
        typer.echo(f"stopped; the same command goes on (finished runs are in {folder})", err=True)
        raise typer.Exit(128 + result.signal)
    _show(result, json)
    if report and result.comparison.runs:
        from scalelong.report import write_report

        page = write_report([folder], folder / "report.html")
        typer.echo(f"page: {page}", err=json)
    if not result.comparison.complete:
        _tell_failures(result)
        raise typer.Exit(1)


def _show(result: Result, json: bool) -> None:
    if json:
        typer.echo(json_module.dumps(result.comparison.to_dict(), ensure_ascii=False))
        return
    from rich.console import Console

    from scalelong.experiments.table import print_comparison

    console = Console()
    print_comparison(result.comparison, console if console.is_terminal else Console(width=max(console.width, 110)))


def _tell_failures(result: Result) -> None:
    for ending in result.failures:
        typer.echo(f"error: {ending.job.name} {ending.reason()}; the end of its log:", err=True)
        for line in ending.lines:
            typer.echo(f"    {line}", err=True)
