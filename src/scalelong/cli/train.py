"""`scalelong train`: train a preset, or go on with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PANEL = "The run"


def train(
    preset: Annotated[str, typer.Argument(help="A preset; `scalelong presets` lists them.")] = "digits",
    scaling: Annotated[
        str | None,
        typer.Option(help="none, uniform, cs, cs-reverse, ls, stable or rezero.", rich_help_panel=PANEL),
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="κ of cs, cs-reverse and uniform.", rich_help_panel=PANEL)] = None,
    data: Annotated[
        str | None, typer.Option(help="A dataset's name, a folder, a .npy file or hf:NAME.", rich_help_panel=PANEL)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps in all.", rich_help_panel=PANEL)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images a step, over all processes.", rich_help_panel=PANEL)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, data order and noise.", rich_help_panel=PANEL)] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default runs/PRESET-SCALING-SEED.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting: train.lr=1e-3, checkpoint.every=100, …")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and leave.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train a diffusion model. The same command again goes on where it stopped.

    Examples:

      scalelong train

      scalelong train cifar10-tiny --scaling cs --kappa 0.7 --steps 5000

      accelerate launch -m scalelong train cifar10-uvit-s --scaling ls
    """
    from scalelong.errors import ScaleLongError
    from scalelong.training.choose import choose, default_out

    if kappa is not None and scaling not in (None, "cs", "cs-reverse", "uniform"):
        raise ScaleLongError(f"--kappa {kappa:g} is for cs, cs-reverse and uniform; scaling {scaling!r} has no κ")
    config = choose(
        preset, scaling=scaling, kappa=kappa, data=data, steps=steps, batch_size=batch_size, seed=seed,
        settings=settings or [],
    )  # fmt: skip
    folder = out or default_out(config)
    if dry_run:
        from scalelong.runs.config import to_json

        typer.echo(to_json(config))
        typer.echo(f"run folder: {folder}", err=True)
        return

    from scalelong.training.loop import train as run_training

    result = run_training(config, folder, quiet=quiet)
    if not result.finished:
        raise typer.Exit(128 + (result.signal or 0))
    if not quiet:
        typer.echo(
            f"trained: {folder} (model/ is the EMA network, samples/ the grids, metrics.jsonl the curves)", err=True
        )
