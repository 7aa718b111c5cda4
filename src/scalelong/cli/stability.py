"""`scalelong kappa`, `theory` and `robustness`: the paper's analysis of a dataset, of Eq. 3's network and of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from scalelong._text import number
from scalelong.cli._names import EXTRACTORS, OBJECTIVES, PROCESSES, check_name, complete_data, one_of
from scalelong.cli._shared import Figure, Json, RunFolder, check_figure, console, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.experiments.robustness import Robustness
    from scalelong.kappa import KappaEstimate
    from scalelong.theory import TheoryReport, Verdict
    from scalelong.theory.propagation import Compared

PAPER = {
    0.5: "the paper's choice for CIFAR-10 and CelebA (N = 6)",
    0.7: "the paper's choice for ImageNet 64 (N = 8 and 10)",
    0.8: "the paper's choice for COCO (N = 6)",
}


def kappa(
    data: Annotated[
        str,
        Option(help="A dataset name, a folder, an archive, a NumPy file, or hf:NAME.", autocompletion=complete_data),
    ],
    skips: Annotated[int, Option(min=1, help="N, the number of long skips of the network.")],
    process: Annotated[
        str | None,
        Option(
            help=f"The noise process: {', '.join(PROCESSES)}. Default: ddpm, or the objective's own.",
            autocompletion=one_of(PROCESSES),
        ),
    ] = None,
    objective: Annotated[
        str,
        Option(help=f"What the network predicts: {', '.join(OBJECTIVES)}.", autocompletion=one_of(tuple(OBJECTIVES))),
    ] = "eps",
    image_size: Annotated[int | None, Option(help="Crop and resize the images to this size first.")] = None,
    samples: Annotated[int, Option(min=1, help="Number of (image, time, noise) draws.")] = 50_000,
    seed: Annotated[int, Option(help="Seed of the draws.")] = 0,
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Propose κ for CS from a dataset's ‖ε‖²/‖x_t‖² and the number of long skips (Section 4.1).

    With another --objective the ratio is that of its target to the network's input: ‖F‖²/‖c_in·x_t‖².

    --figure draws Fig. 3a and 3b for the dataset.

    Example: scalelong kappa --data cifar10 --skips 6
    """
    check_name("process", process, PROCESSES)
    check_name("objective", objective, tuple(OBJECTIVES))
    check_figure(figure)

    from scalelong.data.prepare import load_prepared
    from scalelong.kappa import estimate_kappa
    from scalelong.progress import track
    from scalelong.report.figures import draw_kappa, save_figure

    images = load_prepared(data, image_size=image_size).images
    estimate = estimate_kappa(
        images, skips, process=process, objective=objective, samples=samples, seed=seed, progress=track
    )
    if figure is not None:
        save_figure(draw_kappa(estimate, data), figure)
    if json:
        echo_json({"data": data, **estimate.to_dict()})
        return
    _print_kappa(estimate, data)
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _print_kappa(estimate: KappaEstimate, data: str) -> None:
    quantiles = {f"{level:.0%}": f"{value:.2f}" for level, value in estimate.quantiles.items()}
    means = (f"{estimate.mean_ratio:.2f}", f"{estimate.ratio_of_means:.2f}", f"{estimate.share_below_5:.1%}")
    eps = estimate.objective == "eps"
    ratio = "‖ε‖²/‖x_t‖²" if eps else f"‖target‖²/‖network input‖² of objective {estimate.objective},"
    title = f"{ratio} of {data}, {estimate.process}, {estimate.samples} samples"
    caption = f"of means: {'E‖ε‖²/E‖x_t‖²' if eps else 'ratio of the mean norms'}; the last columns are quantiles"
    columns = ("mean", "of means", "< 5", *quantiles)
    print_table(title, columns, [(*means, *quantiles.values())], left=0, caption=caption)
    choices = [
        (estimate.low, "low: Σκ² equals the mean ratio"),
        (estimate.recommended, "recommended"),
        (estimate.high, f"high: Σκ² equals min(5, N) = {estimate.cap:g}"),
        *PAPER.items(),
    ]
    rows = [
        (text, f"{value:.2f}", f"{estimate.sum_at(value):.2f}", f"{value ** (estimate.num_skips - 1):.2g}")
        for value, text in sorted(choices)
    ]
    print_table(f"κ for {estimate.num_skips} long skips", ("", "κ", "Σκ²", "κ_N"), rows)
    lemma, own = f"{estimate.lemma_input_norm:.3f}", f"{estimate.data_input_norm:.3f}"
    print_lines([
        f"recommended {estimate.recommended:.2f}: {estimate.reason}",
        f"E‖x_t‖²/m = {estimate.mean_input_norm:.3f}; Lemma 3.2 predicts {lemma} for uniform pixels and {own} with "
        f"this dataset's E x_0² = {estimate.pixel_second_moment:.3f}",
        *(f"{notice.level}: {notice.text}" for notice in estimate.notices),
    ])  # fmt: skip


def theory(
    seeds: Annotated[int, Option(min=2, help="Networks per shape and initialization.")] = 32,
    width: Annotated[int, Option(min=32, help="m, the width of the network of Eq. 3.")] = 256,
    skips: Annotated[int, Option(min=1, max=128, help="N, its number of long skips.")] = 6,
    depth: Annotated[int, Option(min=1, help="l, the number of matrices per block.")] = 2,
    kappa: Annotated[float, Option(help="κ of CS and reversed CS.")] = 0.7,
    out: Figure = None,
    json: Json = False,
) -> None:
    """Test every statement of the paper's Section 3 on the network it is about.

    Measures features, gradients and robustness of the network of Eq. 3 over seeds, widths, numbers of skips and
    depths: unscaled, with 1/√2, with CS and with reversed CS, for two initializations. The last table says which
    statements hold as printed.

    Example: scalelong theory --out theory.png
    """
    from scalelong.report.figures import draw_theory, save_figure
    from scalelong.theory import measure_theory, verdicts

    check_figure(out)
    report = measure_theory(seeds=seeds, width=width, skips=skips, depth=depth, kappa=kappa)
    statements = verdicts(report)
    if out is not None:
        save_figure(draw_theory(report), out)
    if json:
        echo_json(report.to_dict() | {"verdicts": [asdict(verdict) for verdict in statements]})
    else:
        _print_theory(report, statements)
        if out is not None:
            typer.echo(f"figure: {out}")


def _print_theory(report: TheoryReport, statements: list[Verdict]) -> None:
    from rich.padding import Padding

    _print_orders(report)
    _print_propagation(report)
    for init in ("norm-preserving", "kaiming"):
        _print_sweep(report, init)
        _print_bounds(report, init)
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


def _print_propagation(report: TheoryReport) -> None:
    """Print Theorems 3.1 and 3.3. With a norm-preserving initialization the path sum is Σκ² + 1 itself."""
    shape = report.shape
    by_init = [[row for row in report.propagation if row.init == init] for init in ("norm-preserving", "kaiming")]
    features, gradients = [], []
    for p, k in zip(*by_init, strict=True):
        paths = number(k.feature.predicted, 3)
        features.append((k.scaling, f"{p.statement:.2f}", _measured(p.feature), paths, _measured(k.feature)))
        mean_field = [number(row.gradient.predicted, 3) for row in (p, k)]
        gradients.append((k.scaling, mean_field[0], _measured(p.gradient), mean_field[1], _measured(k.gradient)))
    title = f"m = {shape.width}, N = {shape.skips}, l = {shape.depth}, {report.seeds} networks"
    columns = ("scaling", "Σκ² + 1", "norm-preserving", "Kaiming's paths", "kaiming")
    print_table(f"Theorem 3.1: ‖h_0‖²/‖x_t‖²; {title}", columns, features, wrap=False)
    title = "Theorem 3.3: the largest ‖∇_W ℓ‖²/(ℓ‖x_t‖²) of any W"
    caption = f"mean field, then measured; W is {by_init[0][-1].matrix} and {by_init[1][-1].matrix}"
    columns = ("scaling", "mean field", "norm-preserving", "mean field", "kaiming")
    print_table(title, columns, gradients, caption=caption, wrap=False)


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


def _print_bounds(report: TheoryReport, init: str) -> None:
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


def _measured(compared: Compared) -> str:
    return f"{number(compared.measured, 3)} ± {number(compared.error, 3)}"


def robustness(
    run: RunFolder,
    variances: Annotated[
        list[float] | None,
        Option(
            "--variance",
            metavar="NUMBER",
            help="σ_δ² of the extra noise; repeatable. Default: 0.003, 0.01, 0.03, 0.1, 0.3.",
        ),
    ] = None,
    images: Annotated[int, Option(help="Held-out images for predictions and losses.")] = 128,
    samples: Annotated[int, Option(help="Samples per Fréchet distance; 0 skips it.")] = 256,
    extractor: Annotated[str, Option(help="pixels (8×8 means, not FID) or inception (FID).")] = "pixels",
    bins: Annotated[int, Option(help="Number of timestep bins.")] = 5,
    points: Annotated[int, Option(help="Inputs per bin for the Lipschitz constant; 0 skips it.")] = 2,
    seed: Annotated[int, Option(help="Seed of the extra noise and the samples.")] = 0,
    out: Figure = None,
    json: Json = False,
) -> None:
    """Measure how extra Gaussian noise at the input changes a run's predictions, losses and samples (Fig. 3c).

    Also measures the local Lipschitz constant and Theorem 3.4's bound. Writes RUN/robustness.json.

    Example: scalelong robustness runs/digits-cs-0.7-seed0 --out robustness.png
    """
    check_name("extractor", extractor, EXTRACTORS)

    from scalelong.evaluation import build_extractor
    from scalelong.experiments.robustness import FILE, VARIANCES, measure_run_robustness
    from scalelong.files import check_target
    from scalelong.report.figures import draw_robustness, save_figure
    from scalelong.runs.generate import best_device
    from scalelong.runs.run import load_run

    check_figure(out)
    trained = load_run(run)
    check_target(trained.folder / FILE)
    network = build_extractor(extractor).to(best_device()) if samples else None  # type: ignore[attr-defined]
    result = measure_run_robustness(
        trained, variances=variances or VARIANCES, images=images, bins=bins, points=points, samples=samples,
        extractor=network, seed=seed,
    )  # fmt: skip
    result.save(trained.folder / FILE)
    if out is not None:
        save_figure(draw_robustness(result), out)
    if json:
        echo_json(result.to_dict())
    else:
        _print_robustness(result)
        typer.echo(f"wrote {trained.folder / FILE}" + (f" and {out}" if out is not None else ""))


def _print_robustness(result: Robustness) -> None:
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
    words, out = result.words, result.words.output
    columns = ("σ_δ²", f"change of {out}", "gain", "loss", *(["distance"] if distances else []))
    print_table(title, columns, rows, left=0)
    print_lines([f"change: E‖Δ{out}‖²/m; gain: √(E‖Δ{out}‖²/E‖δ‖²); loss: the target is {words.meaning}"])
    if result.metric:
        print_lines([f"distance: {result.metric}, {result.samples} samples, δ at every network evaluation"])
    if result.lipschitz:
        _print_lipschitz(result)
    print_lines(result.notes, "note: ")


def _print_lipschitz(result: Robustness) -> None:
    rows = []
    for (low, high), one in zip(pairwise(result.edges), result.lipschitz, strict=True):
        log = one.log10_bound
        bound = "–" if log is None else f"{10**log:.3g}" if log < 5 else f"10^{log:.1f}"
        constant = number(one.network, 3) + ("" if one.converged else "+")
        exceeded = {None: "–", True: "yes", False: "no"}[one.exceeded]
        rows.append((f"{(low + high) / 2:g}", constant, bound, number(one.m0, 3), number(one.middle, 3), exceeded))
    title = f"local Lipschitz constant ({result.points} inputs per bin) and Theorem 3.4"
    columns = ("t", f"‖∂{result.words.output}/∂{result.words.input}‖", "bound", "M₀", "L₀", "exceeded")
    caption = "+: power iteration did not converge, the true value is larger"
    print_table(title, columns, rows, left=0, caption=caption)
