"""`scalelong sample`: sample images from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalelong.cli._shared import (
    BatchSize,
    Device,
    Guidance,
    Precision,
    RunFolder,
    Sampler,
    SamplerSteps,
    check_counts,
    sampling_request,
)


def sample(
    run: RunFolder,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of images.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="A .png file for one grid, or a folder of images. Default: RUN/samples/….png.")
    ] = None,
    sampler: Sampler = None,
    steps: SamplerSteps = None,
    guidance: Guidance = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="A class by number or name; repeatable. Default: all in turn.")
    ] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A text prompt; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Image k depends on (seed, k) only, not on the batch.")] = 0,
    first: Annotated[int, typer.Option(help="Index of the first image.")] = 0,
    batch_size: BatchSize = 64,
    precision: Precision = "fp32",
    device: Device = None,
) -> None:
    """Sample images from a trained run.

    Examples:

      scalelong sample runs/digits-cs-0.7-seed0 --n 100 --out grid.png

      scalelong sample runs/emoji --prompt "a red heart" --guidance 3 --n 4

      scalelong sample runs/digits-class --class 3 --n 16 --out threes/
    """
    import numpy as np

    from scalelong.data.images import save_grid
    from scalelong.files import atomic_file, check_target
    from scalelong.progress import track
    from scalelong.runs import load_run
    from scalelong.runs.generate import best_device, grid_columns

    check_counts(n=n, batch_size=batch_size)
    if out is not None:
        check_target(out, folder=out.suffix.lower() != ".png")
    trained = load_run(run)
    request = sampling_request(
        trained.config, sampler=sampler, steps=steps, guidance=guidance, precision=precision, n=n, seed=seed,
        first=first, batch_size=batch_size, classes=classes or None, prompts=prompts or None,
    )  # fmt: skip
    batches = trained.generate(request, trained.net.to(best_device(device)))
    images = np.concatenate(list(track(batches, "sampling", total=-(-n // batch_size))))
    target = out or trained.samples_path / f"sample-step{trained.step}-seed{seed}.png"
    if target.suffix.lower() == ".png":
        save_grid(images, target, grid_columns(trained.facts, request))
    else:
        from PIL import Image

        for k, image in enumerate(images, start=first):
            picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
            with atomic_file(target / f"{k:06d}.png") as temporary:
                picture.save(temporary, format="PNG")
    typer.echo(str(target))
