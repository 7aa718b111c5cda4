"""`scalelong theory`: the statements of the paper's Section 3, predicted and measured."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from scalelong._text import number
from scalelong.cli._shared import Figure, Json, check_figure, console, echo_json, print_table

if TYPE_CHECKING:
    from scalelong.theory import TheoryReport, Verdict
    from scalelong.theory.propagation import Compared, PropagationRow


def theory(
    seeds: Annotated[int, typer.Option(min=2, help="Networks per shape and initialization.")] = 32,
    width: Annotated[int, typer.Option(min=32, help="m, the width of the network of Eq. 3.")] = 256,
    skips: Annotated[int, typer.Option(min=1, help="N, its number of long skips.")] = 6,
    depth: Annotated[int, typer.Option(min=1, help="l, the number of matrices per block.")] = 2,
    kappa: Annotated[float, typer.Option(help="κ of CS and reversed CS.")] = 0.7,
    out: Figure = None,
    json: Json = False,
) -> None:
    """Test every statement of the paper's Section 3 on the network it is about.

    Measures features, gradients and robustness of the network of Eq. 3 over seeds, widths, numbers of skips and
    depths: unscaled, with 1/√2, with CS and with reversed CS, for two initializations. The last table says which
    statements hold as printed.

    Example: scalelong theory --out theory.png
    """
    from scalelong.theory import measure_theory, verdicts

    check_figure(out)
    report = measure_theory(seeds=seeds, width=width, skips=skips, depth=depth, kappa=kappa)
    statements = verdicts(report)
    if out is not None:
        from scalelong.report.figures import draw_theory, save_figure

        save_figure(draw_theory(report), out)
    if json:
        echo_json(report.to_dict() | {"verdicts": [asdict(verdict) for verdict in statements]})
    else:
        _print(report, statements)
        if out is not None:
            typer.echo(f"figure: {out}")


def _print(report: TheoryReport, statements: list[Verdict]) -> None:
    from rich.padding import Padding

    _print_orders(report)
    _print_features(report)
    _print_gradients(report)
    for init in ("norm-preserving", "kaiming"):
        _print_sweep(report, init)
        _print_robustness(report, init)
    screen = console()
    screen.print("[bold]Does it hold as printed?[/]")
    for verdict in statements:
        mark = "[green]yes[/]" if verdict.holds else "[red]no [/]"
        screen.print(f"{mark} [bold]{verdict.statement}[/] ({verdict.setting}): {verdict.claim}")
        screen.print(Padding(verdict.result, (0, 0, 0, 4)))


def _print_orders(report: TheoryReport) -> None:
    from scalelong.kappa import sum_of_squares
    from scalelong.theory.bounds import log_main_term, orders

    shape = report.shape
    m0 = next(row.m0 for row in report.robustness if row.init == "norm-preserving")
    rows = []
    for name, spec in report.scalings.items():
        total = sum_of_squares(spec.coefficients(shape.skips))
        main = math.exp(log_main_term(spec, shape.skips, math.log(m0)))
        rows.append((name, *orders(spec, shape.skips), f"{total:.2f}", number(main, 3)))
    title = f"The paper's predictions: N = {shape.skips}, m = {shape.width}, and M₀ = {m0:.2f} as measured"
    columns = ("scaling", "features", "robustness", "Σκ²", "Σκ_i M₀^i")
    print_table(title, columns, rows, left=3, wrap=False)


def _print_features(report: TheoryReport) -> None:
    """With a norm-preserving initialization the path sum is Σκ² + 1 itself."""
    shape = report.shape
    network = f"m = {shape.width}, N = {shape.skips}, l = {shape.depth}, {report.seeds} networks"
    rows = [
        (k.scaling, f"{p.statement:.2f}", _measured(p.feature), number(k.feature.predicted, 3), _measured(k.feature))
        for k, p in _pairs(report)
    ]
    columns = ("scaling", "Σκ² + 1", "norm-preserving", "Kaiming's paths", "kaiming")
    print_table(f"Theorem 3.1: ‖h_0‖²/‖x_t‖²; {network}", columns, rows, wrap=False)


def _print_gradients(report: TheoryReport) -> None:
    pairs = _pairs(report)
    rows = [
        (k.scaling, *(text for row in (p, k) for text in (number(row.gradient.predicted, 3), _measured(row.gradient))))
        for k, p in pairs
    ]
    title = "Theorem 3.3: the largest ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of any W"
    kaiming, preserving = pairs[-1]
    caption = f"mean field, then measured; W is {preserving.matrix} and {kaiming.matrix}"
    columns = ("scaling", "mean field", "norm-preserving", "mean field", "kaiming")
    print_table(title, columns, rows, caption=caption, wrap=False)


def _print_sweep(report: TheoryReport, init: str) -> None:
    sweeps = [row for row in report.sweeps if row.init == init]
    rows = [
        (
            f"{row.shape.width}, {row.shape.skips}, {row.shape.depth}", f"{row.feature_ratio:.2f}",
            f"{row.r_squared:.3f}", f"{row.r_squared_paths:.3f}", f"{row.gradient_ratio:.2f}", number(row.constant, 3),
            f"{row.spread:.2f}", f"{row.spread_predicted:.2f}",
        )
        for row in sorted(sweeps, key=lambda row: (row.shape.depth, row.shape.skips, row.shape.width))
    ]  # fmt: skip
    title = f"{init}: measured / predicted, R² of Theorem 3.1 and of the paths, spread"
    columns = ("m, N, l", "features", "R²", "paths", "gradients", "constant", "spread", "predicted")
    print_table(title, columns, rows, wrap=False)


def _print_robustness(report: TheoryReport, init: str) -> None:
    selected = [row for row in report.robustness if row.init == init]
    rows = [
        (
            row.scaling,
            *(number(x, 3) for x in (row.perturbed, row.network, row.main_term, row.paper, row.certified)),
            f"{row.m0:.2f}", f"{row.paper_violations}, {row.certified_violations}",
        )
        for row in selected
    ]  # fmt: skip
    title = f"{init}: ‖ΔUNet‖/‖δ‖ and Theorem 3.4's bounds ({selected[0].checked} networks)"
    columns = ("scaling", "random", "worst", "main term", "paper's", "certified", "M₀", "exceeded")
    caption = "random, worst: direction of δ; exceeded: violations of the paper's and of the certified bound"
    print_table(title, columns, rows, caption=caption, wrap=False)


def _pairs(report: TheoryReport) -> list[tuple[PropagationRow, PropagationRow]]:
    """Return (Kaiming, norm-preserving) for each scaling."""
    rows = {init: [row for row in report.propagation if row.init == init] for init in ("kaiming", "norm-preserving")}
    return list(zip(*rows.values(), strict=True))


def _measured(compared: Compared) -> str:
    return f"{number(compared.measured, 3)} ± {number(compared.error, 3)}"
