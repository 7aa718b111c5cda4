"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from scalelong.cli import data
from scalelong.cli.compare import compare
from scalelong.cli.doctor import doctor
from scalelong.cli.evaluate import evaluate
from scalelong.cli.kappa import kappa
from scalelong.cli.paper import paper
from scalelong.cli.presets import presets
from scalelong.cli.report import report
from scalelong.cli.robustness import robustness
from scalelong.cli.sample import sample
from scalelong.cli.stats import stats
from scalelong.cli.theory import theory
from scalelong.cli.train import train
from scalelong.version import __version__

app = typer.Typer(
    name="scalelong",
    help="Stable, faster diffusion training: scale the long skip connections of U-Nets and U-ViTs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit


@app.callback()
def _scalelong(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


app.command()(train)
app.command()(sample)
app.command()(compare)
app.command()(report)
app.command()(evaluate)
app.command()(presets)
app.command()(doctor)
app.command()(kappa)
app.command()(theory)
app.command()(robustness)
app.command()(paper)
data.app.command()(stats)
app.add_typer(data.app, name="data")
