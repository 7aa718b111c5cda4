"""`scalelong sample`: images from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    n: Annotated[int, typer.Option("--n", "-n", help="How many images.")] = 64,
    out: Annotated[
        Path | None, typer.Option(help="A .png for one sheet, else a folder of images; by default RUN/samples/….png.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="euler-maruyama, euler-ode, dpm-solver-fast, ddpm, ddim or dpm-solver++.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Network evaluations an image.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 is none, the paper's scale s is s + 1 here.")
    ] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="A class by number or name; repeatable. Default: all in turn.")
    ] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A text; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Image k depends on (seed, k), never on the batch.")] = 0,
    first: Annotated[int, typer.Option(help="The number of the first image.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; by default the fastest there is.")] = None,
) -> None:
    """Sample images from a trained run.

    Examples:

      scalelong sample runs/digits-cs-0.7-seed0 --n 100 --out grid.png

      scalelong sample runs/emoji --prompt "a red heart" --guidance 3 --n 4

      scalelong sample runs/digits-class --class 3 --n 16 --out threes/
    """
    import numpy as np

    from scalelong.data.grid import save_grid
    from scalelong.errors import ScaleLongError
    from scalelong.files import atomic_file, check_target
    from scalelong.progress import track
    from scalelong.runs.generate import Request, best_device, generate, grid_columns
    from scalelong.runs.run import load_run

    if n < 1 or batch_size < 1:
        raise ScaleLongError(f"--n and --batch-size are at least 1, not {n} and {batch_size}")
    if out is not None:
        check_target(out, folder=out.suffix.lower() != ".png")
    trained = load_run(run)
    defaults = trained.config.sample
    request = Request(
        n=n,
        sampler=sampler or defaults.sampler,
        steps=steps if steps is not None or sampler is not None else defaults.steps,
        guidance=defaults.guidance if guidance is None else guidance,
        seed=seed,
        first=first,
        batch_size=batch_size,
        classes=classes or None,
        prompts=prompts or None,
        precision=precision,
    )
    net = trained.net.to(best_device(device))
    batches = generate(net, trained.config, trained.facts, request)
    images = np.concatenate(list(track(batches, "sampling", total=-(-n // batch_size))))
    target = out or trained.run.samples / f"sample-step{trained.step}-seed{seed}.png"
    if target.suffix.lower() == ".png":
        save_grid(images, target, grid_columns(trained.facts, request))
    else:
        from PIL import Image

        for k, image in enumerate(images, start=first):
            picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
            with atomic_file(target / f"{k:06d}.png") as aside:
                picture.save(aside, format="PNG")
    typer.echo(str(target))
