"""`scalelong train`: train a preset, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalelong.cli._shared import PresetName, Quiet, Settings


def train(
    preset: PresetName = "digits",
    scaling: Annotated[
        str | None, typer.Option(help="none, uniform, cs, cs-reverse, ls, stable or rezero. Default: the preset's.")
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="κ of cs, cs-reverse and uniform.")] = None,
    data: Annotated[str | None, typer.Option(help="A dataset name, a folder, a .npy file or hf:NAME.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step over all processes.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and noise.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/PRESET-SCALING-seedN.")] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and exit.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a diffusion model. Run the same command again to resume.

    Examples:

      scalelong train

      scalelong train cifar10-tiny --scaling cs --kappa 0.7 --steps 5000

      accelerate launch -m scalelong train cifar10-uvit-s --scaling ls
    """
    from scalelong.errors import InvalidValueError
    from scalelong.training.presets import choose, default_out

    if kappa is not None and scaling not in (None, "cs", "cs-reverse", "uniform"):
        raise InvalidValueError(f"--kappa {kappa:g} needs --scaling cs, cs-reverse or uniform, got {scaling!r}")
    config = choose(
        preset, scaling=scaling, kappa=kappa, data=data, steps=steps, batch_size=batch_size, seed=seed,
        settings=settings or [],
    )  # fmt: skip
    folder = out or default_out(config)
    if dry_run:
        typer.echo(config.to_json())
        typer.echo(f"run folder: {folder}", err=True)
        return

    from scalelong.training.loop import train as run_training

    result = run_training(config, folder, quiet=quiet)
    if not result.finished:
        raise typer.Exit(128 + (result.signal or 0))
    if not quiet:
        typer.echo(f"finished: {folder} (model/ holds the EMA network, metrics.jsonl the curves)", err=True)
