"""`scalelong frontier`: the largest learning rate at which a network still trains, with and without scaling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from scalelong.cli._shared import Figure, Json, check_figure, comma_words, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.experiments.frontier_study import Row


def frontier(
    network: Annotated[
        str, Option(help="eq3 (the paper's Eq. 3), conv-add, conv-cat, uvit, unet; comma-separated.")
    ] = "eq3",
    optimizer: Annotated[str, Option(help="sgd, momentum, adamw; comma-separated.")] = "sgd",
    scalings: Annotated[str, Option(help="NAME or NAME:κ, comma-separated; `none` is the baseline.")] = (
        "none,uniform,cs:0.7,cs:0.5"
    ),
    skips: Annotated[str, Option(help="N, numbers of long skips; comma-separated.")] = "6,12",
    seeds: Annotated[str, Option(help="Number of seeds, or seeds such as 4,7.")] = "3",
    steps: Annotated[int, Option(min=10, help="Steps of each short run.")] = 100,
    sensitivity: Annotated[
        bool, Option("--sensitivity", help="Train on a grid of learning rates over three decades instead of a search.")
    ] = False,
    largest: Annotated[float, Option(help="The largest learning rate of --sensitivity.")] = 1.0,
    jobs: Annotated[int | None, Option(min=1, help="Runs in parallel. Default: one per CPU core.")] = None,
    out: Annotated[Path, Option(help="Folder of the trials; the same command resumes.")] = Path("runs/frontier"),
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Find the largest learning rate at which a network still trains, for each scaling, by bisection.

    A run diverges if it becomes non-finite, or if its loss after --steps is above that of the untrained network. The
    default shows Theorem 3.3 at work in about a minute: plain SGD on the network of Eq. 3.

    Examples:

      scalelong frontier --figure frontier.png

      scalelong frontier --network uvit --optimizer adamw --skips 6

      scalelong frontier --sensitivity --skips 12 --figure sensitivity.png
    """
    from scalelong.errors import InvalidValueError, invalid
    from scalelong.experiments.frontier_study import GRID, cells, measure_frontier, measure_sensitivity
    from scalelong.experiments.plan import parse_seeds
    from scalelong.experiments.scheduler import usable_cores
    from scalelong.report.figures import draw_frontier, draw_sensitivity, save_figure
    from scalelong.scaling import parse_scaling, split_scalings

    check_figure(figure)
    if not 0 < largest < float("inf"):
        raise invalid("--largest", "a number > 0", largest)
    numbers = comma_words(skips)
    if not numbers or not all(word.isdecimal() for word in numbers):
        raise invalid("--skips", "integers >= 1, such as 6,12", skips)
    specs = [parse_scaling(word) for word in split_scalings(scalings)]
    study = cells(comma_words(network), comma_words(optimizer), specs, [int(word) for word in numbers], steps)
    chosen, workers = parse_seeds(seeds), jobs or usable_cores()
    if sensitivity:
        result = measure_sensitivity(study, chosen, [largest * factor for factor in GRID], out, workers)
        if figure is not None:
            save_figure(draw_sensitivity(result), figure)
        _print_sensitivity(result, len(chosen)) if not json else echo_json({"sensitivity": result})
    else:
        found = measure_frontier(study, chosen, out, workers)
        rows, failures = found.rows, found.failures
        if figure is not None and rows:
            save_figure(draw_frontier(rows), figure)
        if json:
            echo_json({"frontier": [row.to_dict() for row in rows], "failures": failures})
        elif rows:
            _print_frontier(rows, len(chosen))
        if failures:
            raise InvalidValueError("; ".join(failures))
    if figure is not None and not json:
        typer.echo(f"figure: {figure}")


def _print_frontier(rows: list[Row], seeds: int) -> None:
    from scalelong.experiments.frontier import TOLERANCE

    settings = dict.fromkeys((row.cell.network, row.cell.optimizer) for row in rows)
    for network, optimizer in settings:
        own = [row for row in rows if (row.cell.network, row.cell.optimizer) == (network, optimizer)]
        predicted = any(row.predicted is not None for row in own)
        table = []
        for row in own:
            found, ratio = row.frontier, row.ratio
            against = "–" if ratio is None else f"{ratio.mean:.2f}×"
            if ratio is not None and ratio.low is not None and not row.cell.scaling.is_identity:
                against += f" [{ratio.low:.2f}, {ratio.high:.2f}]"
            cells = [str(row.cell.skips), row.cell.scaling.label, str(found), against]
            table.append(
                [*cells, f"{row.predicted:.2f}×" if row.predicted is not None else "–"][: 5 if predicted else 4]
            )
        title = (
            f"{network}, {optimizer}: the largest learning rate that trains, {own[0].cell.steps} steps, "
            f"{seeds} seed{'' if seeds == 1 else 's'}"
        )
        columns = ("N", "scaling", "frontier", "against none", "predicted")[: 5 if predicted else 4]
        print_table(title, columns, table, left=2, wrap=False)
    print_lines([
        "geometric means over seeds with their 95 % interval; ratios are paired by seed",
        *(["predicted: by the mean field of Theorem 3.3"] if any(row.predicted is not None for row in rows) else []),
        f"each search ends within {TOLERANCE - 1:.0%} of the frontier; intervals do not contain that",
        "a search takes for granted that what diverges at one learning rate diverges at every larger one"
        + ("; with adamw it may train again" if any(row.cell.optimizer == "adamw" for row in rows) else ""),
    ])  # fmt: skip


def _print_sensitivity(rows: list[dict[str, Any]], seeds: int) -> None:
    for row in rows:
        pairs = zip(row["lr"], row["loss"], row["diverged"], strict=True)
        table = [(f"{lr:.2g}", f"{loss:.4g}", str(diverged)) for lr, loss, diverged in pairs]
        spread = row["sensitivity"]
        ends = "" if spread["low"] is None else f" [{spread['low']:.3g}, {spread['high']:.3g}]"
        setting = f"{row['network']}, {row['optimizer']}, N = {row['skips']}, {row['label']}"
        columns = ("lr", "final loss", f"diverged of {seeds}")
        print_table(f"{setting}: sensitivity {spread['mean']:.3g}{ends}", columns, table, left=0, wrap=False)
    print_lines(["sensitivity: mean over the grid of the final loss (at most the untrained one) minus the best"])
