"""`scalelong robustness`: measure how extra input noise changes a trained run."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from scalelong._text import number
from scalelong.cli._shared import Figure, Json, RunFolder, check_figure, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.experiments.robustness import Robustness


def robustness(
    run: RunFolder,
    variances: Annotated[
        list[float] | None,
        typer.Option("--variance", help="σ_δ² of the extra noise; repeatable. Default: 0.003, 0.01, 0.03, 0.1, 0.3."),
    ] = None,
    images: Annotated[int, typer.Option(help="Held-out images for predictions and losses.")] = 128,
    samples: Annotated[int, typer.Option(help="Samples per Fréchet distance; 0 skips it.")] = 256,
    extractor: Annotated[str, typer.Option(help="pixels (8×8 means, not FID) or inception (FID).")] = "pixels",
    bins: Annotated[int, typer.Option(help="Number of timestep bins.")] = 5,
    points: Annotated[int, typer.Option(help="Inputs per bin for the Lipschitz constant; 0 skips it.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the extra noise and the samples.")] = 0,
    out: Figure = None,
    json: Json = False,
) -> None:
    """Measure how extra Gaussian noise at the input changes a run's predictions, losses and samples (Fig. 3c).

    Also measures the local Lipschitz constant and Theorem 3.4's bound. Writes RUN/robustness.json.

    Example: scalelong robustness runs/digits-cs-0.7-seed0 --out robustness.png
    """
    from scalelong.experiments.robustness import FILE, VARIANCES, measure_run_robustness
    from scalelong.runs.run import load_run

    check_figure(out)
    trained = load_run(run)
    network = None
    if samples:
        from scalelong.evaluation import build_extractor
        from scalelong.runs.generate import best_device

        network = build_extractor(extractor).to(best_device())  # type: ignore[attr-defined]
    result = measure_run_robustness(
        trained, variances=variances or VARIANCES, images=images, bins=bins, points=points, samples=samples,
        extractor=network, seed=seed,
    )  # fmt: skip
    result.save(trained.folder / FILE)
    if out is not None:
        from scalelong.report.figures import draw_robustness, save_figure

        save_figure(draw_robustness(result), out)
    if json:
        echo_json(result.to_dict())
    else:
        _print(result)
        typer.echo(f"wrote {trained.folder / FILE}" + (f" and {out}" if out is not None else ""))


def _print(result: Robustness) -> None:
    distances = {distance.variance: distance for distance in result.distances}
    rows = []
    for row in result.sensitivity:
        overall = row.overall
        gain = f"{overall.gain:.3f}" if row.variance else "–"
        cells = [f"{row.variance:g}", f"{overall.change:.4g}", gain, f"{overall.loss:.4f}"]
        if (distance := distances.get(row.variance)) is not None:
            interval = "" if distance.low is None else f" ({distance.low:.3g} … {distance.high:.3g})"
            cells.append(f"{distance.value:.3g}{interval}")
        rows.append(cells)
    title = f"{result.run}, step {result.step}: extra noise δ at the input, {result.images} images"
    columns = ("σ_δ²", "change of ε̂", "gain", "loss", *(["distance"] if distances else []))
    print_table(title, columns, rows, left=0)
    print_lines(["change: E‖Δε̂‖²/m; gain: √(E‖Δε̂‖²/E‖δ‖²); loss: the target is the noise that made x_t"])
    if result.metric:
        print_lines([f"distance: {result.metric}, {result.samples} samples, δ at every network evaluation"])
    if result.lipschitz:
        _print_lipschitz(result)
    print_lines(result.notes, "note: ")


def _print_lipschitz(result: Robustness) -> None:
    rows = []
    for (low, high), one in zip(pairwise(result.edges), result.lipschitz, strict=True):
        bound = "–" if one.log10_bound is None else _power(one.log10_bound)
        constant = number(one.network, 3) + ("" if one.converged else "+")
        exceeded = {None: "–", True: "yes", False: "no"}[one.exceeded]
        rows.append((f"{(low + high) / 2:g}", constant, bound, number(one.m0, 3), number(one.middle, 3), exceeded))
    title = f"local Lipschitz constant ({result.points} inputs per bin) and Theorem 3.4"
    columns = ("t", "‖∂ε̂/∂x_t‖", "bound", "M₀", "L₀", "exceeded")
    caption = "+: power iteration did not converge, the true value is larger"
    print_table(title, columns, rows, left=0, caption=caption)


def _power(log10: float) -> str:
    return f"{10**log10:.3g}" if log10 < 5 else f"10^{log10:.1f}"
