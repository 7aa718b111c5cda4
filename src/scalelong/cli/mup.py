"""`scalelong coords` and `scalelong transfer`: check μP; do settings of a small network hold on a large one?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from scalelong._text import number, with_interval
from scalelong.cli._shared import (
    DataName,
    Figure,
    Json,
    PresetName,
    Settings,
    check_figure,
    comma_words,
    echo_json,
    integers,
    print_lines,
    print_table,
)  # fmt: skip

if TYPE_CHECKING:
    from scalelong.experiments.coords import Coordinates
    from scalelong.experiments.transfer import Curve

Widths = Annotated[str, Option(help="embed_dim of a U-ViT, or a U-Net's first channels; comma-separated.")]
Base = Annotated[
    int | None, Option(help="Width at which μP equals the standard parametrization. Default: the preset's.")
]
Parametrizations = Annotated[str, Option("--parametrizations", help="standard, mup; comma-separated.")]
Seeds = Annotated[str, Option(help="Number of seeds, or seeds such as 4,7.")]
Parallel = Annotated[int | None, Option(help="Runs in parallel. Default: one per CPU core.")]


def coords(
    preset: PresetName = None,
    widths: Widths = "32,64,128,256",
    base_width: Base = None,
    parametrizations: Parametrizations = "standard,mup",
    steps: Annotated[int, Option(min=2, help="Training steps before the activations are compared.")] = 5,
    seeds: Seeds = "3",
    data: DataName = None,
    settings: Settings = None,
    jobs: Parallel = None,
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Check μP: do activations, and their change in a few steps, keep their size as the network gets wider?

    Prints the slope of log size against log width for every kind of layer; |slope| ≤ 0.1 passes. The standard
    parametrization fails. Exits with code 1 if μP fails.

    Examples:

      scalelong coords uvit-64 --widths 32,64,128

      scalelong coords digits --widths 16,32,64 --figure coords.png
    """
    from scalelong.experiments.coords import LIMIT, coordinate_check, overall
    from scalelong.experiments.plan import parse_seeds
    from scalelong.experiments.scheduler import usable_cores
    from scalelong.report.figures import draw_coordinates, save_figure
    from scalelong.training.presets import choose

    check_figure(figure)
    config = choose(preset or "uvit-64", data=data, settings=settings)
    words = comma_words(parametrizations)
    options: dict[str, Any] = {"base_width": base_width, "steps": steps, "seeds": parse_seeds(seeds)}
    rows = coordinate_check(config, integers("--widths", widths), words, jobs=jobs or usable_cores(), **options)
    verdicts = {word: overall([row for row in rows if row.parametrization == word]) for word in words}
    if figure is not None:
        save_figure(draw_coordinates(rows), figure)
    if json:
        echo_json({"limit": LIMIT, "verdicts": verdicts, "layers": [row.to_dict() for row in rows]})
    else:
        for word in words:
            _print_coordinates(word, verdicts[word], [row for row in rows if row.parametrization == word], steps)
        print_lines([
            f"slopes of log RMS against log width with 95 % intervals; pass: |slope| ≤ {LIMIT:g}; fail: the interval "
            "lies outside; unclear: neither, more seeds or widths would decide"
        ])  # fmt: skip
        if figure is not None:
            typer.echo(f"figure: {figure}")
    if verdicts.get("mup") == "fail":
        raise typer.Exit(1)


def transfer(
    preset: PresetName = None,
    widths: Widths = "32,64,128,256",
    lrs: Annotated[
        str | None, Option(help="Learning rates; comma-separated. Default: the preset's × 1/8, 1/4, …, 8.")
    ] = None,
    depths: Annotated[str | None, Option(help="Depths of a U-ViT; comma-separated. Default: the preset's.")] = None,
    scalings: Annotated[
        str | None, Option(help="Scalings of the long skips, such as none,cs:0.5. Default: the preset's.")
    ] = None,
    base_width: Base = None,
    base_depth: Annotated[
        int | None, Option(help="Depth at which CompleteP equals the standard network. Default: the preset's.")
    ] = None,
    parametrizations: Parametrizations = "standard,mup",
    steps: Annotated[int | None, Option(min=1, help="Steps of each run. Default: the preset's.")] = None,
    seeds: Seeds = "2",
    data: DataName = None,
    settings: Settings = None,
    jobs: Parallel = None,
    out: Annotated[Path, Option(help="Folder of the trials; the same command resumes.")] = Path("runs/transfer"),
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Sweep learning rates at several widths: does the best one stay, in the standard parametrization and in μP?

    Examples:

      scalelong transfer uvit-64 --widths 32,64,128 --steps 300 --figure transfer.png

      scalelong transfer uvit-64 --widths 64,128 --scalings none,cs:0.7,cs:0.5 --lrs 1e-3 --parametrizations mup
    """
    from scalelong.errors import invalid
    from scalelong.experiments.plan import parse_seeds
    from scalelong.experiments.scheduler import usable_cores
    from scalelong.experiments.transfer import measure_transfer
    from scalelong.report.figures import draw_transfer, save_figure
    from scalelong.scaling import parse_scaling, split_scalings
    from scalelong.training.presets import choose

    check_figure(figure)
    config = choose(preset or "uvit-64", data=data, steps=steps, settings=settings)
    try:
        rates = [float(word) for word in comma_words(lrs)] if lrs else [config.train.lr * 2.0**k for k in range(-3, 4)]
    except ValueError:
        raise invalid("--lrs", "numbers such as 1e-3,2e-3", lrs) from None
    curves = measure_transfer(
        config, widths=integers("--widths", widths), rates=rates, out=out,
        depths=integers("--depths", depths) if depths else None,
        scalings=[parse_scaling(word) for word in split_scalings(scalings)] if scalings else None,
        parametrizations=comma_words(parametrizations), base_width=base_width, base_depth=base_depth,
        seeds=parse_seeds(seeds), jobs=jobs or usable_cores(),
    )  # fmt: skip
    if figure is not None:
        save_figure(draw_transfer(curves), figure)
    if json:
        echo_json({"preset": config.preset, "steps": config.train.steps, "curves": [c.to_dict() for c in curves]})
        return
    _print_transfer(curves, config.train.steps)
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _print_coordinates(word: str, verdict: str, rows: list[Coordinates], steps: int) -> None:
    table = []
    for row in rows:
        size, change = (
            "zero" if e is None else with_interval(round(e.mean, 2), _round(e.low), _round(e.high), 2)
            for e in (row.size, row.change)
        )
        table.append([row.layer, size, change, row.verdict])
    columns = ("layer", "size at the start", f"change in {steps} steps", "verdict")
    print_table(f"{word}: {verdict}", columns, table, left=1, wrap=False)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _print_transfer(curves: list[Curve], steps: int) -> None:
    from scalelong.experiments.transfer import spread

    several = len({(c.cell.depth, c.cell.scaling) for c in curves}) > len({c.cell.depth for c in curves})
    table = []
    for curve in curves:
        cell, best = curve.cell, curve.optimum
        words = [cell.parametrization, str(cell.width), "" if cell.depth is None else str(cell.depth)]
        bound = "" if curve.inside else " (edge of the grid)"
        rate, loss = "a seed diverged at every rate", "diverged"
        if not curve.diverged:
            rate = with_interval(best.mean, best.low, best.high, 3) + bound
            loss = with_interval(curve.best.mean, curve.best.low, curve.best.high)
        table.append([*words, cell.scaling.label, rate, loss])
    columns = ["", "width", "depth", "scaling", "best learning rate", "its loss"]
    keep = [True, True, any(c.cell.depth for c in curves), several, len(curves[0].losses) > 1, True]
    rows = [[text for text, kept in zip(row, keep, strict=True) if kept] for row in table]
    title = f"validation loss of the EMA weights after {steps} steps"
    print_table(title, [c for c, kept in zip(columns, keep, strict=True) if kept], rows, left=sum(keep[:4]), wrap=False)
    if len(curves[0].losses) > 1:
        print_lines([
            f"{name}: the best learning rates of all widths lie within a factor of {number(factor, 3)}"
            for name, factor in spread(curves).items()
        ])  # fmt: skip
        if not all(curve.inside and not curve.diverged for curve in curves):
            print_lines(["a width whose best learning rate is at an edge of the grid has no factor: widen --lrs"])
