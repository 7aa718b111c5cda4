"""`scalelong kappa`: propose kappa from a dataset and the number of long skips."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scalelong.kappa import KappaEstimate

PAPER = {
    0.5: "the paper's for CIFAR-10 and CelebA (N = 6)",
    0.7: "for ImageNet 64 (N = 8 and 10)",
    0.8: "for COCO (N = 6)",
}


def kappa(
    data: Annotated[str, typer.Option(help="A dataset's name, a folder, an archive, a NumPy file, or hf:NAME.")],
    skips: Annotated[int, typer.Option(min=1, help="N, the network's number of long skips.")],
    process: Annotated[str, typer.Option(help="The noise process: ddpm, vp or sd.")] = "ddpm",
    image_size: Annotated[int | None, typer.Option(help="Crop and resize the images to this first.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many (image, time, noise) to measure.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Of the choice of images, times and noise.")] = 0,
    figure: Annotated[
        Path | None, typer.Option(help="Write Fig. 3a and 3b for these data here (.png, .svg, .pdf).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Propose kappa for CS from a dataset's ‖ε‖²/‖x_t‖² and the number of long skips (Section 4.1).

    Example: scalelong kappa --data cifar10 --skips 6
    """
    from scalelong.data import load
    from scalelong.files import FIGURES, check_target
    from scalelong.kappa import estimate_kappa

    if figure is not None:
        check_target(figure, suffixes=FIGURES)
    images = load(data, split="train", image_size=image_size).images
    estimate = estimate_kappa(images, num_skips=skips, process=process, samples=samples, seed=seed)
    if figure is not None:
        from scalelong.report.figures import draw_kappa, save_figure

        save_figure(draw_kappa(estimate, data), figure)
    if json:
        typer.echo(json_module.dumps({"data": data, **estimate.to_dict()}))
        return
    _print(estimate, data)
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _print(estimate: KappaEstimate, data: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(emoji=False)
    table = Table(
        title=f"‖ε‖²/‖x_t‖² of {escape(data)}, {estimate.process}, {estimate.samples} samples", title_justify="left"
    )
    for column in ("mean", "of means", "< 5", *(f"{level:.0%}" for level in estimate.quantiles)):
        table.add_column(column, justify="right")
    quantiles = [f"{value:.2f}" for value in estimate.quantiles.values()]
    table.add_row(
        f"{estimate.mean_ratio:.2f}", f"{estimate.ratio_of_means:.2f}", f"{estimate.share_below_5:.1%}", *quantiles
    )
    table.caption = "of means: E‖ε‖²/E‖x_t‖²; then quantiles"
    console.print(table)

    table = Table(title=f"kappa for {estimate.num_skips} long skips", title_justify="left")
    for column, justify in (("kappa", "right"), ("Σκ²", "right"), ("κ_N", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    rows = [
        (estimate.low, "low: Σκ² at the mean ratio"),
        (estimate.recommended, "[bold]recommended[/]"),
        (estimate.high, f"high: Σκ² at min(5, N) = {estimate.cap:g}"),
        *PAPER.items(),
    ]
    for value, what in sorted(rows, key=lambda row: row[0]):
        innermost = value ** (estimate.num_skips - 1)
        table.add_row(f"{value:.2f}", f"{estimate.sum_at(value):.2f}", f"{innermost:.2g}", what)
    console.print(table)
    console.print(f"recommended {estimate.recommended:.2f}: {estimate.reason}", highlight=False)
    console.print(
        f"E‖x_t‖²/m = {estimate.mean_input_norm:.3f}; Lemma 3.2 says {estimate.lemma_input_norm:.3f} for uniform "
        f"pixels and {estimate.data_input_norm:.3f} with these data's own E x_0² = {estimate.pixel_second_moment:.3f}",
        highlight=False,
    )
    for notice in estimate.notices:
        console.print(f"[yellow]{notice.level}[/]: {notice.text}", highlight=False)
