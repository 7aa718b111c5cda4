"""The table of commands."""

from typing import Annotated

import typer
from typer import Option

from scalelong.cli._shared import Command, Group
from scalelong.cli.campaign import campaign
from scalelong.cli.data import app as data_app
from scalelong.cli.evaluate import evaluate
from scalelong.cli.export import export
from scalelong.cli.frontier import frontier
from scalelong.cli.info import doctor, presets
from scalelong.cli.mup import coords, transfer
from scalelong.cli.paper import paper
from scalelong.cli.probe import probe
from scalelong.cli.runs import compare, report, sample, train
from scalelong.cli.skips import freeze, tune_skips
from scalelong.cli.stability import kappa, robustness, theory
from scalelong.cli.tune import tune
from scalelong.version import __version__

app = typer.Typer(
    name="scalelong",
    cls=Group,
    help="Scale the long skip connections of diffusion U-Nets and U-ViTs: train, sample, evaluate, monitor.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit


@app.callback()
def _scalelong(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    pass


COMMANDS = (
    train,
    sample,
    compare,
    report,
    evaluate,
    export,
    presets,
    doctor,
    kappa,
    theory,
    frontier,
    robustness,
    probe,
    coords,
    transfer,
    tune,
    tune_skips,
    freeze,
    paper,
    campaign,
)
for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"), cls=Command)(command)
app.add_typer(data_app, name="data", cls=Group)
