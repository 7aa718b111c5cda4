"""`scalelong theory`: the paper's Section 3, predicted beside measured."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table

    from scalelong.theory import TheoryReport
    from scalelong.theory.propagation_rows import Compared, PropagationRow
    from scalelong.theory.verdicts import Verdict


def theory(
    seeds: Annotated[int, typer.Option(min=2, help="Networks to build for each shape and initialisation.")] = 32,
    width: Annotated[int, typer.Option(min=32, help="m, the width of the network of Eq. 3.")] = 256,
    skips: Annotated[int, typer.Option(min=1, help="N, its number of long skips.")] = 6,
    depth: Annotated[int, typer.Option(min=1, help="l, the matrices in each block.")] = 2,
    kappa: Annotated[float, typer.Option(help="The kappa of CS and of reversed CS.")] = 0.7,
    out: Annotated[Path | None, typer.Option(help="Write the figure here (.png, .svg, .pdf).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Hold every statement of the paper's Section 3 against the network it is about.

    Features, gradients and robustness of the network of Eq. 3 are measured over seeds, widths, numbers of skips and
    depths, unscaled, with 1/√2, with CS and with reversed CS, in both initialisations; the last table says which
    statements hold as printed.

    Example: scalelong theory --out theory.png
    """
    from scalelong.files import FIGURES, check_target
    from scalelong.theory import measure_theory
    from scalelong.theory.verdicts import verdicts

    if out is not None:
        check_target(out, suffixes=FIGURES)
    report = measure_theory(seeds=seeds, width=width, skips=skips, depth=depth, kappa=kappa)
    found = verdicts(report)
    if out is not None:
        from scalelong.report.figures import draw_theory, save_figure

        save_figure(draw_theory(report), out)
    if json:
        typer.echo(json_module.dumps(report.to_dict() | {"verdicts": [asdict(verdict) for verdict in found]}))
    else:
        _print(report, found)
        if out is not None:
            typer.echo(f"figure: {out}")


def _print(report: TheoryReport, found: list[Verdict]) -> None:
    from rich.console import Console

    console = Console()
    tables = [_orders(report), _features(report), _gradients(report)]
    for init in ("norm-preserving", "kaiming"):
        tables += [_sweep(report, init), _robustness(report, init)]
    for table in tables:
        console.print(table)
    console.print("[bold]Does it hold as printed?[/]")
    for verdict in found:
        mark = "[green]yes[/]" if verdict.holds else "[red]no [/]"
        console.print(f"{mark} [bold]{verdict.statement}[/] ({verdict.setting}): {verdict.says}", highlight=False)
        console.print(_indented(verdict.found))


def _orders(report: TheoryReport) -> Table:
    import math

    from scalelong.theory.bounds import closed_sum_of_squares, log_main_term, orders

    shape = report.shape
    m0 = next(row.m0 for row in report.robustness if row.init == "norm-preserving")
    title = f"What the paper says: N = {shape.skips}, m = {shape.width}, and M₀ = {m0:.2f} as measured"
    table = _table(title, "scaling", "features", "robustness", "Σκ²", "Σκ_i M₀^i", left=3)
    for name, spec in report.scalings.items():
        order = orders(spec, shape.skips, shape.width, math.log(m0))
        total, main = closed_sum_of_squares(spec, shape.skips), math.exp(log_main_term(spec, shape.skips, math.log(m0)))
        table.add_row(name, order.feature, order.robustness, f"{total:.2f}", _short(main))
    return table


def _features(report: TheoryReport) -> Table:
    """With a norm-preserving initialisation the path sum is Σκ² + 1 itself."""
    shape = report.shape
    table = _table(
        f"Theorem 3.1: ‖h_0‖²/‖x_t‖²; m = {shape.width}, N = {shape.skips}, l = {shape.depth}, {report.seeds} networks",
        "scaling", "Σκ² + 1", "norm-preserving", "Kaiming's paths", "kaiming", left=1,
    )  # fmt: skip
    for kaiming, preserving in _pairs(report):
        table.add_row(
            kaiming.scaling,
            f"{preserving.statement:.2f}",
            _measured(preserving.feature),
            _short(kaiming.feature.predicted),
            _measured(kaiming.feature),
        )
    return table


def _gradients(report: TheoryReport) -> Table:
    table = _table(
        "Theorem 3.3: the largest ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of any W",
        "scaling", "mean field", "norm-preserving", "mean field", "kaiming", left=1,
    )  # fmt: skip
    for kaiming, preserving in _pairs(report):
        table.add_row(
            kaiming.scaling,
            _short(preserving.gradient.predicted),
            _measured(preserving.gradient),
            _short(kaiming.gradient.predicted),
            _measured(kaiming.gradient),
        )
    table.caption = f"mean field, then measured; W is {preserving.matrix} and {kaiming.matrix}"
    return table


def _sweep(report: TheoryReport, init: str) -> Table:
    title = f"{init}: measured over predicted, R² of Theorem 3.1 and of the paths, spread"
    columns = ("features", "R²", "paths", "gradients", "constant", "spread", "predicted")
    table = _table(title, "m, N, l", *columns, left=1)
    rows = [row for row in report.sweeps if row.init == init]
    for row in sorted(rows, key=lambda r: (r.shape.depth, r.shape.skips, r.shape.width)):
        table.add_row(
            f"{row.shape.width}, {row.shape.skips}, {row.shape.depth}",
            f"{row.feature_ratio:.2f}",
            f"{row.r_squared:.3f}",
            f"{row.r_squared_paths:.3f}",
            f"{row.gradient_ratio:.2f}",
            _short(row.constant),
            f"{row.spread:.2f}",
            f"{row.spread_predicted:.2f}",
        )
    return table


def _robustness(report: TheoryReport, init: str) -> Table:
    rows = [row for row in report.robustness if row.init == init]
    title = f"{init}: ‖ΔUNet‖/‖δ‖ and Theorem 3.4's bounds ({rows[0].checked} networks)"
    bounds = ("main term", "paper's", "certified")
    table = _table(title, "scaling", "random", "worst", *bounds, "M₀", "exceeded", left=1)
    for row in rows:
        table.add_row(
            row.scaling,
            _short(row.perturbed),
            _short(row.network),
            _short(row.main_term),
            _short(row.paper),
            _short(row.certified),
            f"{row.m0:.2f}",
            f"{row.paper_violations}, {row.certified_violations}",
        )
    table.caption = "random, worst: direction of δ; exceeded: the paper's bound, the certified one"
    return table


def _pairs(report: TheoryReport) -> list[tuple[PropagationRow, PropagationRow]]:
    """(Kaiming, norm-preserving) for each scaling."""
    kaiming, preserving = (
        [row for row in report.propagation if row.init == init] for init in ("kaiming", "norm-preserving")
    )
    return list(zip(kaiming, preserving, strict=True))


def _table(title: str, *columns: str, left: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 0, 0, 1)  # fits 80 columns
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k < left else "right", no_wrap=True)
    return table


def _indented(text: str) -> Padding:
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 4))


def _measured(compared: Compared) -> str:
    return f"{_short(compared.measured)} ± {_short(compared.error)}"


def _short(value: float) -> str:
    """Three digits; whole numbers up to a hundred thousand, powers of ten beyond."""
    if abs(value) >= 1e5:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
