"""`scalelong paper`: the paper's tables and figures, at a size a CPU can run or at the paper's size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from scalelong.cli._shared import Gpus, Jobs, Json, Quiet, console, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.paper.items import Item
    from scalelong.paper.run import Options


def paper(
    item: Annotated[str, Argument(help="figure-1, 3, 5, 6, 7, 11, 12 or 13, table-1 … 4; or list, all or page.")],
    size: Annotated[str, Option(help="cpu, or paper for the paper's presets on GPUs.")] = "cpu",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands, steps and cost, and exit.")] = False,
    seeds: Annotated[
        str | None, Option(help="Number of seeds, or a list of seeds such as 4,7. Default: the item's, 3.")
    ] = None,
    steps: Annotated[int | None, Option(help="Steps of every run. Default: the item's.")] = None,
    study: Annotated[
        str | None, Option(help="Only this study of the item; --dry-run lists them. Default: all.")
    ] = None,
    jobs: Jobs = None,
    gpus: Gpus = 1,
    memory: Annotated[
        float | None, Option(help="GiB of one GPU, which paper-size runs are made to fit. Default: this machine's.")
    ] = None,
    train: Annotated[bool, Option("--train/--no-train", help="Train missing runs, or judge the finished ones.")] = True,
    runs: Annotated[Path, Option(help="Folder of the runs, shared between items.")] = Path("runs/paper"),
    out: Annotated[Path, Option(help="Folder for ITEM.json and ITEM.png.")] = Path("results/paper"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table or a figure of the paper and test the paper's claims.

    Verdicts follow from 95 % intervals over seeds by a rule fixed beforehand (docs/paper.md). Run the same command
    again to resume.

    Examples:

      scalelong paper list

      scalelong paper figure-1

      scalelong paper table-1 --size paper --dry-run --gpus 8 --memory 40

      scalelong paper figure-5 --size paper --study cifar10-curves --dry-run

      scalelong paper all --no-train; scalelong paper page
    """
    from scalelong.experiments.plan import parse_seeds
    from scalelong.paper.items import find_item
    from scalelong.paper.run import Options

    chosen = None if seeds is None else parse_seeds(seeds)
    options = Options(
        size=size, runs=runs, results=out, seeds=chosen, steps=steps, study=study, jobs=jobs, gpus=gpus, memory=memory,
        train=train, quiet=quiet,
    )  # fmt: skip
    if item == "list":
        _list(options, json)
    elif item == "page":
        from scalelong.files import write_text
        from scalelong.paper.page import PAGE, page

        write_text(PAGE, page(out))
        typer.echo(f"page: {PAGE}")
    elif item == "all":
        _run_all(options, dry_run, json)
    else:
        _run(find_item(item), options, dry_run, json)


def _run_all(options: Options, dry_run: bool, json: bool) -> None:
    """Run the items one after the other. An item that fails does not stop the rest; the exit code is then 1."""
    from scalelong.errors import ScaleLongError
    from scalelong.paper.items import ITEMS

    failed = False
    for item in ITEMS.values():
        try:
            _run(item, options, dry_run, json)
        except ScaleLongError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


def _run(item: Item, options: Options, dry_run: bool, json: bool) -> None:
    from scalelong.paper.run import StoppedError, run_item

    if dry_run:
        _dry_run(item, options, json)
        return
    try:
        result = run_item(item, options)
    except StoppedError as stopped:
        typer.echo("stopped; run the same command again to resume", err=True)
        raise typer.Exit(128 + stopped.args[0]) from None
    if json:
        echo_json(result)
    else:
        _print(result, options)
    for line in result["failures"]:
        typer.echo(f"error: {line}", err=True)
    if result["failures"]:
        raise typer.Exit(1)


def _dry_run(item: Item, options: Options, json: bool) -> None:
    from dataclasses import asdict, replace

    from scalelong.paper.cost import cost_of, describe_cost

    if options.memory is None and options.size == "paper":
        options = replace(options, memory=24 if options.gpus == 1 else 40)
    studies = options.studies(item)
    commands = [line for study in studies for line in study.commands(options.runs, options.gpus)]
    commands += item.commands if options.size == "paper" else ()
    costs = describe_cost(item, studies, options.size, options.gpus)
    if json:
        each = {study.name: asdict(cost_of(study, options.size, options.gpus)) for study in studies}
        echo_json({"item": item.name, "commands": commands, "cost": costs, "studies": each})
        return
    typer.echo(f"# {item.name}: {item.title} ({options.size} size)")
    for line in (*(f"# {cost}" for cost in costs), *commands):
        typer.echo(line)


def _list(options: Options, json: bool) -> None:
    from scalelong.paper.cost import minutes_on_two_cores
    from scalelong.paper.items import ITEMS
    from scalelong.paper.run import read_result

    rows = [
        {
            "item": item.name,
            "shows": item.shows,
            "minutes": round(minutes_on_two_cores(item)),
            "state": _state(read_result(options.results / f"{item.name}.json")),
        }
        for item in ITEMS.values()
    ]
    if json:
        echo_json(rows)
        return
    cells = [[str(value) for value in row.values()] for row in rows]
    print_table("", ("item", "what the paper shows", "min on 2 cores", "state"), cells, left=4, lines=True)
    print_lines(
        ["Minutes count all runs; items share runs. --size paper --dry-run prints the cost at the paper's size."]
    )


def _state(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result["verdicts"].items() if count)
    return counts if result["complete"] else f"incomplete ({len(result['missing'])} runs missing): {counts}"


def _print(result: dict[str, Any], options: Options) -> None:
    from scalelong.paper.page import measured

    screen = console()
    screen.print(f"[bold]{result['item']}: {result['title']}[/]")
    screen.print(f"The paper shows {result['paper_shows']}.", markup=False)
    for table in result["tables"]:
        print_table(table["title"], table["columns"], table["rows"], left=len(table["columns"]))
    rows = [
        (claim["claim"], claim["paper"], claim["predicted"], measured(claim), claim["verdict"])
        for claim in result["claims"]
    ]
    print_table("claims", ("claim", "paper", "predicted", "measured [95 %]", "verdict"), rows, left=5, lines=True)
    print_lines(result["notes"], "• ")
    if not result["complete"]:
        screen.print(f"incomplete: {len(result['missing'])} runs are missing", style="yellow")
    typer.echo(f"wrote {options.results / result['figure']} and the .json file with the same name")
