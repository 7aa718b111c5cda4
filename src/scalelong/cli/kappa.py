"""`scalelong kappa`: propose κ from a dataset and the number of long skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from scalelong.cli._shared import Figure, Json, check_figure, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.kappa import KappaEstimate

PAPER = {
    0.5: "the paper's choice for CIFAR-10 and CelebA (N = 6)",
    0.7: "the paper's choice for ImageNet 64 (N = 8 and 10)",
    0.8: "the paper's choice for COCO (N = 6)",
}


def kappa(
    data: Annotated[str, typer.Option(help="A dataset name, a folder, an archive, a NumPy file, or hf:NAME.")],
    skips: Annotated[int, typer.Option(min=1, help="N, the number of long skips of the network.")],
    process: Annotated[str, typer.Option(help="The noise process: ddpm, vp or sd.")] = "ddpm",
    image_size: Annotated[int | None, typer.Option(help="Crop and resize the images to this size first.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of (image, time, noise) draws.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    figure: Figure = None,
    json: Json = False,
) -> None:
    """Propose κ for CS from a dataset's ‖ε‖²/‖x_t‖² and the number of long skips (Section 4.1).

    --figure draws Fig. 3a and 3b for the dataset.

    Example: scalelong kappa --data cifar10 --skips 6
    """
    from scalelong.data import load
    from scalelong.kappa import estimate_kappa
    from scalelong.progress import track

    check_figure(figure)
    images = load(data, split="train", image_size=image_size).images
    estimate = estimate_kappa(images, skips, process=process, samples=samples, seed=seed, progress=track)
    if figure is not None:
        from scalelong.report.figures import draw_kappa, save_figure

        save_figure(draw_kappa(estimate, data), figure)
    if json:
        echo_json({"data": data, **estimate.to_dict()})
        return
    _print(estimate, data)
    if figure is not None:
        typer.echo(f"figure: {figure}")


def _print(estimate: KappaEstimate, data: str) -> None:
    quantiles = {f"{level:.0%}": f"{value:.2f}" for level, value in estimate.quantiles.items()}
    means = (f"{estimate.mean_ratio:.2f}", f"{estimate.ratio_of_means:.2f}", f"{estimate.share_below_5:.1%}")
    print_table(
        f"‖ε‖²/‖x_t‖² of {data}, {estimate.process}, {estimate.samples} samples",
        ("mean", "of means", "< 5", *quantiles),
        [(*means, *quantiles.values())],
        left=0,
        caption="of means: E‖ε‖²/E‖x_t‖²; the last columns are quantiles",
    )
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
    print_lines(
        (
            f"recommended {estimate.recommended:.2f}: {estimate.reason}",
            f"E‖x_t‖²/m = {estimate.mean_input_norm:.3f}; Lemma 3.2 predicts {lemma} for uniform pixels and {own} with "
            f"this dataset's E x_0² = {estimate.pixel_second_moment:.3f}",
            *(f"{notice.level}: {notice.text}" for notice in estimate.notices),
        )
    )
