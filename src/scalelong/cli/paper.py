"""`scalelong paper`: the paper's tables and figures, at a size a CPU can run or at the paper's own."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scalelong.paper.item import Item
    from scalelong.paper.run import Options

WORDS = ("list", "all", "page")


def paper(
    item: Annotated[str, typer.Argument(help="figure-1, 3, 5, 6, 7, 11, 12, 13, table-1 … 4; or list, all, page.")],
    size: Annotated[str, typer.Option(help="cpu, or paper: the real presets, for GPUs.")] = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, steps and cost, and leave.")] = False,
    seeds: Annotated[
        str | None, typer.Option(help="How many seeds, or the seeds themselves: 4,7. By default the item's own, 3.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of every run, in place of the item's own.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; by default one a GPU, else one a core.")] = None,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train what is missing, or judge what is there.")
    ] = True,
    runs: Annotated[Path, typer.Option(help="Where runs are kept, shared between items.")] = Path("runs/paper"),
    out: Annotated[Path, typer.Option(help="Where ITEM.json and ITEM.png go.")] = Path("results/paper"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run a table or a figure of the paper and hold it against the paper's claims.

    Verdicts follow from 95 % intervals over seeds by a rule stated beforehand (docs/paper.md). The same command again
    goes on where it stopped.

    Examples:

      scalelong paper list

      scalelong paper figure-1

      scalelong paper table-1 --size paper --dry-run

      scalelong paper all --no-train; scalelong paper page
    """
    from scalelong.errors import unknown
    from scalelong.experiments.plan import parse_seeds
    from scalelong.paper.registry import ITEMS, find_item
    from scalelong.paper.run import Options

    chosen = None if seeds is None else parse_seeds(seeds)
    options = Options(size=size, runs=runs, results=out, seeds=chosen, steps=steps, jobs=jobs, train=train, quiet=quiet)
    if item == "list":
        _list(options, json)
    elif item == "page":
        from scalelong.paper.page import PAGE, write_page

        typer.echo(f"page: {write_page(out, PAGE)}")
    elif item == "all":
        _all(list(ITEMS.values()), options, dry_run, json)
    else:
        try:
            found = find_item(item)
        except ValueError:
            raise unknown("item", item, [*ITEMS, *WORDS]) from None
        _do(found, options, dry_run, json)


def _all(items: list[Item], options: Options, dry_run: bool, json: bool) -> None:
    """One after the other; what cannot be run does not stop the rest, and the exit code tells."""
    from scalelong.errors import ScaleLongError

    failed = False
    for item in items:
        try:
            _do(item, options, dry_run, json)
        except ScaleLongError as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


def _do(item: Item, options: Options, dry_run: bool, json: bool) -> None:
    from scalelong.paper.run import StoppedError, run_item

    if dry_run:
        _dry_run(item, options, json)
        return
    try:
        result = run_item(item, options)
    except StoppedError as stopped:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(128 + stopped.signal) from None
    if json:
        typer.echo(json_module.dumps(result, ensure_ascii=False))
    else:
        _print(result, options)
    for line in result["failures"]:
        typer.echo(f"error: {line}", err=True)
    if result["failures"]:
        raise typer.Exit(1)


def _dry_run(item: Item, options: Options, json: bool) -> None:
    from scalelong.paper.cost import describe_cost

    seeds = options.seeds
    commands = [
        line
        for study in item.studies(options.size)
        for line in study.commands(study.seeds if seeds is None else seeds, options.runs, options.steps)
    ]
    commands += list(item.commands) if options.size == "paper" else []
    costs = describe_cost(item, options.size, seeds, options.steps)
    if json:
        typer.echo(json_module.dumps({"item": item.name, "commands": commands, "cost": costs}, ensure_ascii=False))
        return
    typer.echo(f"# {item.name}: {item.title} ({options.size} size)")
    for line in costs:
        typer.echo(f"# {line}")
    for line in commands:
        typer.echo(line)


def _list(options: Options, json: bool) -> None:
    from scalelong.paper.cost import minutes_on_two_cores
    from scalelong.paper.registry import ITEMS
    from scalelong.paper.run import read_result

    rows = []
    for item in ITEMS.values():
        result = read_result(options.results / f"{item.name}.json")
        minutes = round(minutes_on_two_cores(item))
        rows.append({"item": item.name, "shows": item.shows, "minutes": minutes, "state": _state(result)})
    if json:
        typer.echo(json_module.dumps(rows, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for name in ("item", "what the paper shows", "min on 2 cores", "state"):
        table.add_column(name, justify="right" if name.startswith("min") else "left")
    for row in rows:
        table.add_row(str(row["item"]), str(row["shows"]), str(row["minutes"]), str(row["state"]))
    console = Console()
    (console if console.is_terminal else Console(width=max(console.width, 120))).print(table)
    typer.echo("Minutes are from nothing; items share runs. --size paper --dry-run has the cost at the paper's size.")


def _state(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result["verdicts"].items() if count)
    return counts if result["complete"] else f"incomplete ({len(result['missing'])} runs missing): {counts}"


def _print(result: dict[str, Any], options: Options) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from scalelong.paper.page import measured

    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, 120))
    console.print(f"[bold]{result['item']}: {result['title']}[/]", highlight=False)
    console.print(f"The paper shows {result['paper_shows']}.", highlight=False, markup=False)
    for facts in result["tables"]:
        table = Table(title=facts["title"], title_justify="left")
        for column in facts["columns"]:
            table.add_column(escape(column))
        for row in facts["rows"]:
            table.add_row(*(escape(text) for text in row))
        console.print(table)
    table = Table(title="claims", title_justify="left", show_lines=True)
    for column in ("claim", "the paper", "predicted", "measured [95 %]", "verdict"):
        table.add_column(column)
    for claim in result["claims"]:
        cells = (claim["claim"], claim["paper"], claim["predicted"], measured(claim), claim["verdict"])
        table.add_row(*(escape(text) for text in cells))
    console.print(table)
    for note in result["notes"]:
        console.print(f"• {note}", highlight=False, markup=False)
    if not result["complete"]:
        console.print(f"incomplete: {len(result['missing'])} runs are missing", style="yellow")
    typer.echo(f"written: {options.results / result['figure']} and .json beside it")
