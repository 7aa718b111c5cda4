"""`scalelong robustness`: what extra noise at the input does to a trained run."""

from __future__ import annotations

import json as json_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scalelong.experiments.robustness import Robustness


def robustness(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    variances: Annotated[
        list[float] | None,
        typer.Option("--variance", help="σ_δ² of the extra noise; repeatable. Default: 0.003, 0.01, 0.03, 0.1, 0.3."),
    ] = None,
    images: Annotated[int, typer.Option(help="Held-out images for predictions and losses.")] = 128,
    samples: Annotated[int, typer.Option(help="Samples for each Fréchet distance; 0 leaves it out.")] = 256,
    extractor: Annotated[str, typer.Option(help="pixels (8×8 means, not FID) or inception (FID).")] = "pixels",
    bins: Annotated[int, typer.Option(help="Timestep bins.")] = 5,
    points: Annotated[int, typer.Option(help="Inputs a bin for the Lipschitz constant; 0 leaves it out.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the extra noise and the samples.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figure here (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how extra Gaussian noise at the input moves a run's predictions, losses and samples (Fig. 3c).

    Beside it stands the network's local Lipschitz constant with Theorem 3.4's bound. Writes RUN/robustness.json.

    Example: scalelong robustness runs/digits-cs-0.7-seed0 --out robustness.png
    """
    from scalelong.experiments.robustness import FILE, VARIANCES, measure_run, save
    from scalelong.files import FIGURES, check_target
    from scalelong.runs.run import load_run

    if out is not None:
        check_target(out, suffixes=FIGURES)
    trained = load_run(run)
    network = None
    if samples:
        from scalelong.experiments.distance import build

        network = build(extractor)
    result = measure_run(
        trained, variances=variances or VARIANCES, images=images, bins=bins, points=points, samples=samples,
        extractor=network, seed=seed,
    )  # fmt: skip
    save(result, trained.run.folder / FILE)
    if out is not None:
        from scalelong.report.figures import draw_robustness, save_figure

        save_figure(draw_robustness(result), out)
    if json:
        typer.echo(json_module.dumps(result.to_dict(), ensure_ascii=False))
    else:
        _print(result)
        typer.echo(f"written: {trained.run.folder / FILE}" + (f", {out}" if out is not None else ""))


def _print(result: Robustness) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(emoji=False)
    title = f"{escape(result.run)}, step {result.step}: extra noise δ at the input, {result.images} images"
    console.print(f"[bold]{title}[/]", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    names = ["σ_δ²", "change of ε̂", "gain", "loss", *(["distance"] if result.distances else [])]
    for name in names:
        table.add_column(name, justify="right")
    distances = {d.variance: d for d in result.distances}
    for row in result.sensitivity:
        moved = row.overall
        gain = f"{moved.gain:.3f}" if row.variance else "–"
        cells = [f"{row.variance:g}", f"{moved.change:.4g}", gain, f"{moved.loss:.4f}"]
        if (found := distances.get(row.variance)) is not None:
            around = "" if found.low is None else f" ({found.low:.3g} … {found.high:.3g})"
            cells.append(f"{found.value:.3g}{around}")
        table.add_row(*cells)
    console.print(table)
    console.print("change: E‖Δε̂‖²/m; gain: √(E‖Δε̂‖²/E‖δ‖²); loss: with the noise that x_t was made with as target")
    if result.metric:
        console.print(f"distance: {result.metric}, {result.samples} samples with δ at every evaluation of the network")
    if result.lipschitz:
        title = f"local Lipschitz constant ({result.points} inputs a bin) and Theorem 3.4"
        console.print(f"\n[bold]{title}[/]", highlight=False)
        console.print(_lipschitz(result))
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _lipschitz(result: Robustness) -> object:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("t", "‖∂ε̂/∂x_t‖", "bound", "M₀", "L₀", "exceeded"):
        table.add_column(name, justify="right")
    for (low, high), one in zip(pairwise(result.edges), result.lipschitz, strict=True):
        bound = "–" if one.log10_bound is None else _power(one.log10_bound)
        table.add_row(
            f"{(low + high) / 2:g}", f"{one.network:.3g}" + ("" if one.converged else "+"), bound,
            "–" if one.m0 is None else f"{one.m0:.3g}", "–" if one.middle is None else f"{one.middle:.3g}",
            {None: "–", True: "yes", False: "no"}[one.exceeded],
        )  # fmt: skip
    table.caption = "+: power iteration had not settled, the true value is larger"
    table.caption_justify = "left"
    return table


def _power(log10: float) -> str:
    return f"{10**log10:.3g}" if log10 < 5 else f"10^{log10:.1f}"
