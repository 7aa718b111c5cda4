"""`scalelong compare` and `scalelong report`: train variants under equal conditions, and show runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalelong.cli._shared import Jobs, Json, PresetName, Quiet, Settings, console, echo_json


def compare(
    preset: PresetName = "digits",
    scalings: Annotated[
        str, typer.Option(help="The baseline first: none, uniform, cs, cs-reverse, ls, stable, rezero; cs:0.5 sets κ.")
    ] = "none,uniform,cs,ls",
    seeds: Annotated[str, typer.Option(help="Number of seeds, or a list of seeds such as 4,7.")] = "3",
    steps: Annotated[int | None, typer.Option(help="Steps of every run.")] = None,
    kappa: Annotated[float | None, typer.Option(help="κ of cs and cs-reverse.")] = None,
    settings: Settings = None,
    distance: Annotated[
        str, typer.Option(help="Features of the Fréchet distance: pixels (8×8 means, not FID), inception (FID), none.")
    ] = "pixels",
    samples: Annotated[int, typer.Option(help="Number of samples for the distance.")] = 256,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/compare-PRESET.")] = None,
    jobs: Jobs = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write OUT/report.html at the end.")] = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train variants with the same data order, noise and initial weights, and compare them over seeds.

    Run the same command again to resume; on Ctrl-C every run writes a checkpoint.

    Examples:

      scalelong compare

      scalelong compare cifar10-tiny --scalings none,cs:0.5,cs:0.7,ls --seeds 3 --steps 5000

      scalelong compare digits --seeds 1 --set model.depth=24 --out runs/deep
    """
    from scalelong.experiments.compare import run_comparison
    from scalelong.experiments.plan import DistanceSpec, parse_seeds, scaling_variants

    variants = scaling_variants(preset, scalings, kappa=kappa, steps=steps, settings=settings or [])
    spec = None if distance == "none" else DistanceSpec(distance, samples)
    folder = out or Path("runs") / f"compare-{preset}"
    result = run_comparison(variants, parse_seeds(seeds), folder, distance=spec, jobs=jobs, quiet=quiet)
    if result.signal is not None:
        typer.echo(f"stopped; run the same command again to resume (finished runs are in {folder})", err=True)
        raise typer.Exit(128 + result.signal)
    if json:
        echo_json(result.comparison.to_dict())
    else:
        from scalelong.experiments.compare import print_comparison

        print_comparison(result.comparison, console())
    if report and result.comparison.runs:
        from scalelong.report import write_report

        page = write_report([folder], folder / "report.html")
        typer.echo(f"page: {page}", err=json)
    if not result.comparison.complete:
        for ending in result.failures:
            typer.echo(f"error: {ending.job.name} {ending.reason()}; the last lines of its log:", err=True)
            for line in ending.lines:
                typer.echo(f"    {line}", err=True)
        raise typer.Exit(1)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or the folder of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="Default: report.html in RUN, or in the current folder for several runs.")
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
