"""`scalelong campaign`: train the missing runs of a written plan, and say what its records show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from scalelong.cli._shared import Gpus, Jobs, Json, comma_words, echo_json, print_failures, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.experiments.scheduler import Ending

START, END = "<!-- generated: scalelong campaign --page -->", "<!-- end -->"


def campaign(
    folders: Annotated[list[Path], Argument(help="Folders with a plan.toml, such as results/campaign/cifar10.")],
    run: Annotated[bool, Option(help="Train the missing runs; --no-run reads the records only.")] = True,
    limit: Annotated[int | None, Option(min=1, help="Train at most this many runs of each campaign.")] = None,
    arms: Annotated[str, Option(help="Train only these arms, to share a campaign between machines.")] = "",
    jobs: Jobs = None,
    gpus: Gpus = 1,
    runs: Annotated[Path, Option(help="Folder of run folders, which are needed only while a run trains.")] = Path(
        "runs/campaign"
    ),
    page: Annotated[Path | None, Option(help="Rewrite the generated part of this Markdown page.")] = None,
    json: Json = False,
) -> None:
    """Run a campaign: many runs from a written plan, over as many sessions as it takes.

    FOLDER/plan.toml states arms, seeds and the rule. Each finished run leaves FOLDER/ARM-seedN.json; runs that have one
    are not repeated. Stop it at any time: unfinished runs resume from --runs, finished ones stay.

    Examples:

      scalelong campaign results/campaign/digits-norms

      scalelong campaign results/campaign/* --no-run --page docs/campaign.md
    """
    from scalelong.errors import invalid
    from scalelong.experiments.campaign import read_plan, run_missing
    from scalelong.experiments.campaign_results import Results, overview
    from scalelong.experiments.campaign_results import page as render
    from scalelong.files import write_text
    from scalelong.report.campaign import draw_campaign
    from scalelong.report.figures import save_figure

    plans = [read_plan(folder) for folder in folders if run or (folder / "plan.toml").exists()]
    if not plans:
        raise invalid("folders", "at least one folder with a plan.toml", ", ".join(map(str, folders)))
    for plan in plans:
        plan.check_arms(comma_words(arms))
    failures: list[Ending] = []
    for plan in plans if run else ():
        worked = run_missing(plan, runs, jobs, limit, gpus=gpus, arms=comma_words(arms))
        if worked.signal is not None:
            raise typer.Exit(128 + worked.signal)
        failures += worked.failures
    results = [Results(plan) for plan in plans]
    for one in results if run or page is not None else ():
        for name, figure in draw_campaign(one).items():
            save_figure(figure, one.plan.folder / name)
    if page is not None:
        text = page.read_text(encoding="utf-8") if page.exists() else f"{START}\n{END}\n"
        before, after = text.partition(START)[0], text.partition(END)[2]
        write_text(page, f"{before}{START}\n{render(results)}{END}{after}")
    if json:
        echo_json({"campaigns": [one.to_dict() for one in results]})
    for one in results if not json else ():
        columns, *rows = overview(one)
        plain = [[cell.replace("**", "") for cell in row] for row in rows]
        if plain:
            print_table(f"{one.plan.title}: variant over baseline", columns, plain, left=1)
        print_lines([one.state if plain else f"{one.plan.title}: {one.state}"])
    if failures:
        print_failures(failures)
        raise typer.Exit(1)
