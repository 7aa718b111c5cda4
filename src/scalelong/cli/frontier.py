"""`scalelong frontier`: the largest stable learning rate of a network, with and without scaling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from scalelong.cli._shared import Figure, Json, check_figure, comma_words, echo_json, integers, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.experiments.frontier_study import Exponents, Frontiers
    from scalelong.experiments.statistics import Estimate


def frontier(
    network: Annotated[
        str, Option(help="eq3 (the paper's Eq. 3), conv-add, conv-cat, uvit, unet; comma-separated.")
    ] = "eq3",
    optimizer: Annotated[str, Option(help="sgd, momentum, adamw; comma-separated.")] = "sgd",
    scalings: Annotated[str, Option(help="NAME or NAME:κ, comma-separated; `none` is the baseline.")] = (
        "none,uniform,cs:0.7,cs:0.5"
    ),
    skips: Annotated[str, Option(help="N, numbers of long skips; comma-separated.")] = "6,12",
    width: Annotated[
        str, Option(help="Widths, comma-separated. Default: 64 (eq3, uvit), 16 (conv-add, conv-cat), 32 (unet).")
    ] = "",
    seeds: Annotated[str, Option(help="Number of seeds, or seeds such as 4,7.")] = "3",
    steps: Annotated[str, Option(help="Steps of each short run; comma-separated.")] = "100",
    sensitivity: Annotated[
        bool, Option("--sensitivity", help="Train on a grid of learning rates over three decades instead of a search.")
    ] = False,
    largest: Annotated[
        float | None, Option(help="The largest learning rate of --sensitivity.", show_default="1.0")
    ] = None,
    jobs: Annotated[int | None, Option(min=1, help="Runs in parallel. Default: one per CPU core.")] = None,
    out: Annotated[Path, Option(help="Folder of the trials; the same command resumes.")] = Path("runs/frontier"),
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Find the largest learning rate at which a network does not diverge, for each scaling, by bisection.

    A run diverges if it becomes non-finite, or if its loss after --steps is above that of the untrained network. The
    default shows Theorem 3.3 at work in about a minute: plain SGD on the network of Eq. 3. With several values of
    --skips, --width or --steps, power laws say how the frontier depends on them.

    Examples:

      scalelong frontier --figure frontier.png

      scalelong frontier --network uvit --optimizer adamw --skips 6

      scalelong frontier --scalings none,cs:0.5 --skips 3,6,12 --width 16,64,256

      scalelong frontier --sensitivity --skips 12 --figure sensitivity.png
    """
    from scalelong.errors import InvalidValueError, invalid
    from scalelong.experiments.frontier_study import GRID, cells, measure_frontier, measure_sensitivity
    from scalelong.experiments.plan import parse_seeds
    from scalelong.experiments.scheduler import usable_cores
    from scalelong.report.figures import draw_frontier, draw_sensitivity, save_figure
    from scalelong.scaling import parse_scaling, split_scalings

    check_figure(figure)
    if largest is not None and not sensitivity:
        raise invalid("--largest", "left out without --sensitivity", largest)
    if largest is not None and not 0 < largest < float("inf"):
        raise invalid("--largest", "a number > 0", largest)
    specs = [parse_scaling(word) for word in split_scalings(scalings)]
    if any(spec.needs_example for spec in specs):
        raise invalid("--scalings", "scalings with a κ, such as cs:0.5 (`scalelong kappa` proposes one)", scalings)
    sizes = integers("--skips", skips), integers("--steps", steps)
    widths = integers("--width", width) if width else []
    study = cells(comma_words(network), comma_words(optimizer), specs, *sizes, widths)
    chosen, workers = parse_seeds(seeds), jobs or usable_cores()
    try:
        if sensitivity:
            result = measure_sensitivity(study, chosen, [(largest or 1.0) * factor for factor in GRID], out, workers)
        else:
            found = measure_frontier(study, chosen, out, workers)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command resumes", err=True)
        raise typer.Exit(130) from None
    if sensitivity:
        if figure is not None:
            save_figure(draw_sensitivity(result), figure)
        _print_sensitivity(result, len(chosen)) if not json else echo_json({"sensitivity": result})
    else:
        rows, failures = found.rows, found.failures
        if figure is not None and rows:
            save_figure(draw_frontier(rows), figure)
        if json:
            exponents = [fit.to_dict() for fit in found.exponents]
            echo_json({"frontier": [row.to_dict() for row in rows], "exponents": exponents, "failures": failures})
        elif rows:
            _print_frontier(found, len(chosen))
        if failures:
            raise InvalidValueError("; ".join(failures))
    if figure is not None and not json:
        typer.echo(f"figure: {figure}")


def _print_frontier(found: Frontiers, seeds: int) -> None:
    from scalelong.experiments.frontier import TOLERANCE
    from scalelong.experiments.frontier_study import FACTORS, several, size_text

    rows = found.rows
    for network, optimizer in dict.fromkeys((row.cell.network, row.cell.optimizer) for row in rows):
        own = [row for row in rows if (row.cell.network, row.cell.optimizer) == (network, optimizer)]
        predicted = any(row.predicted is not None for row in own)
        shown = ["skips", *(name for name in several([row.cell for row in own]) if name != "skips")]
        table = []
        for row in own:
            against = "–" if row.ratio is None else f"{row.ratio.mean:.3g}×"
            if row.ratio is not None and not row.cell.scaling.is_identity:
                against += _interval(row.ratio, ".3g")
            sizes = [str(getattr(row.cell, name)) for name in shown]
            theory = [f"{row.predicted:.3g}×" if row.predicted is not None else "–"] if predicted else []
            table.append([*sizes, row.cell.scaling.label, str(row.frontier), against, *theory])
        fixed = size_text(own[0].cell, [name for name in FACTORS if name not in shown])
        setting = ", ".join([network, optimizer, *fixed, f"{seeds} seed{'' if seeds == 1 else 's'}"])
        title = f"{setting}: the largest stable learning rate"
        columns = [*(FACTORS[name] for name in shown), "scaling", "frontier", "against none"]
        print_table(title, [*columns, *(["predicted"] if predicted else [])], table, left=len(shown) + 1, wrap=False)
        if fits := [fit for fit in found.exponents if (fit.network, fit.optimizer) == (network, optimizer)]:
            _print_exponents(fits)
    print_lines([
        "stable: finite, and at the end no loss above that of the untrained network",
        "geometric means over seeds with their 95 % interval; ratios are paired by seed",
        *(["predicted: by the mean field of Theorem 3.3"] if any(row.predicted is not None for row in rows) else []),
        *(["p: least squares of the logarithms, one point per setting and seed"] if found.exponents else []),
        f"each search ends within {TOLERANCE - 1:.0%} of the frontier; intervals do not contain that",
        "a search takes for granted that what diverges at one learning rate diverges at every larger one"
        + ("; with adamw it may train again" if any(row.cell.optimizer == "adamw" for row in rows) else ""),
    ])  # fmt: skip


def _print_exponents(fits: list[Exponents]) -> None:
    from scalelong.experiments.frontier_study import FACTORS

    names = [name for name in FACTORS if any(name in fit.frontier for fit in fits)]
    columns = [f"{what}, {FACTORS[name]}" for what in ("frontier", "against none") for name in names]
    table = []
    for fit in fits:
        estimates = [found.get(name) for found in (fit.frontier, fit.ratio) for name in names]
        powers = ("–" if power is None else f"{power.mean:z.2f}{_interval(power, 'z.2f')}" for power in estimates)
        table.append([fit.scaling.label, *powers])
    law = " · ".join(f"{FACTORS[name]}^p" for name in names)
    title = f"{fits[0].network}, {fits[0].optimizer}: the exponents p of frontier ∝ {law}, and of its ratio to none"
    print_table(title, ["scaling", *columns], table, left=1, wrap=False)


def _interval(estimate: Estimate, form: str) -> str:
    return "" if estimate.low is None else f" [{estimate.low:{form}}, {estimate.high:{form}}]"


def _print_sensitivity(rows: list[dict[str, Any]], seeds: int) -> None:
    for row in rows:
        pairs = zip(row["lr"], row["loss"], row["diverged"], strict=True)
        table = [(f"{lr:.2g}", f"{loss:.4g}", str(diverged)) for lr, loss, diverged in pairs]
        spread = row["sensitivity"]
        ends = "" if spread["low"] is None else f" [{spread['low']:.3g}, {spread['high']:.3g}]"
        size = f"N = {row['skips']}, width {row['width']}, {row['steps']} steps"
        setting = f"{row['network']}, {row['optimizer']}, {size}, {row['label']}"
        columns = ("lr", "final loss", f"diverged of {seeds}")
        print_table(f"{setting}: sensitivity {spread['mean']:.3g}{ends}", columns, table, left=0, wrap=False)
    print_lines(["sensitivity: mean over the grid of the final loss (at most the untrained one) minus the best"])
