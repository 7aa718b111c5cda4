"""`scalelong tune`: find the scaling, κ and learning rate of a preset within a budget."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from scalelong._text import number, with_interval
from scalelong.cli._shared import (
    DataName,
    Holdout,
    Jobs,
    Json,
    PresetName,
    Quiet,
    Settings,
    check_counts,
    comma_words,
    echo_json,
    print_lines,
    print_table,
    start,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from scalelong.experiments.tuning import Tuning
    from scalelong.runs import Config

COLUMNS = ("candidate", "steps", "validation loss", "worse than the best by", "")


def tune(
    preset: PresetName = None,
    over: Annotated[str, Option(help="What to search: scaling, kappa, lr; comma-separated.")] = "scaling,kappa",
    budget: Annotated[
        str | None,
        Option(help="Of all runs together, at most: 2000steps, 90s, 30m or 1h. Default: a third of the full grid."),
    ] = None,
    scalings: Annotated[str | None, Option(help="The scalings of --over scaling. Default: none,uniform,cs,ls.")] = None,
    confidence: Annotated[float, Option(help="Probability with which the best candidate survives.")] = 0.95,
    data: DataName = None,
    steps: Annotated[int | None, Option(min=1, help="Steps of a full training. Default: the preset's.")] = None,
    seeds: Annotated[
        str, Option(help="Number of seeds, or seeds such as 4,7; every candidate trains with each.")
    ] = "3",
    holdout: Holdout = None,
    settings: Settings = None,
    jobs: Jobs = None,
    out: Annotated[Path | None, Option(help="Folder of the runs; the same command resumes.")] = None,
    report: Annotated[bool, Option("--report/--no-report", help="Write OUT/report.html at the end.")] = True,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Find a setting: candidates train side by side on the same data and noise, and those that are worse stop early.

    They are compared after an eighth, a quarter, a half and all of --steps, paired by seed: runs of one seed share data
    order, noise and initial weights. "No difference worth choosing" is a valid answer. The learning rate is constant
    during the search.

    Examples:

      scalelong tune digits --over kappa --budget 2000steps

      scalelong tune digits --over scaling,lr --budget 30m
    """
    from scalelong.errors import invalid
    from scalelong.experiments.plan import parse_seeds
    from scalelong.experiments.tuning import Budget, InterruptedSearchError, candidates_of, parse_budget, tune_preset
    from scalelong.training.presets import choose, start_name

    if not 0 < confidence < 1:
        raise invalid("--confidence", "in (0, 1)", confidence)
    check_counts(jobs=jobs)
    chosen = parse_seeds(seeds)
    data_options: dict[str, Any] = {"image_size": None, "channels": None, "background": None, "holdout": holdout}
    begun = start(preset, None, settings, steps=steps, data=data, skip_bad=False, quiet=quiet or json, **data_options)
    config = choose(begun.config, steps=steps, settings=settings)
    found = candidates_of(config, comma_words(over), scalings)
    grid = len(found) * config.train.steps * len(chosen)
    total = Budget(grid // 3) if budget is None else parse_budget(budget, *_speed(found[0].config, jobs))
    folder = out or Path("runs") / f"tune-{start_name(config)}"
    if not json and not quiet:
        budget_text = f"at most {min(total.steps, grid):,} steps ({min(1, total.steps / grid):.0%} of the full grid)"
        budget_text += f" and {budget}" if total.seconds else ""
        print_lines([f"{len(found)} candidates × {len(chosen)} seeds, {budget_text}, in {folder}"])
    try:
        tuning = tune_preset(found, chosen, folder, budget=total, confidence=confidence, jobs=jobs, quiet=quiet or json)
    except InterruptedSearchError as error:
        print_lines([str(error)])
        raise typer.Exit(128 + error.signal) from None
    command = _command(preset, tuning, data, holdout, steps, settings or [])
    page = write_page(tuning, folder, command, [start_name(config), f"{len(chosen)} seeds"]) if report else None
    if json:
        echo_json({**_as_dict(tuning), "command": command, "page": page and str(page)})
        return
    _print(tuning, command, confidence)
    if page:
        print_lines([f"page: {page}"])


def _speed(config: Config, jobs: int | None) -> tuple[Callable[[], float], int]:
    """Return a measurement of seconds per step with the threads that each run will have, and the runs in parallel."""
    from scalelong.experiments.scheduler import usable_cores, visible_gpus

    gpus, cores = visible_gpus(), usable_cores()
    workers = jobs or len(gpus) or cores

    def measure() -> float:
        import torch

        from scalelong.runs.generate import best_device
        from scalelong.training.examples import Examples
        from scalelong.training.speed import step_seconds

        before = torch.get_num_threads()
        torch.set_num_threads(max(1, cores // workers))
        try:
            shapes = Examples(config, config.data.split).shapes
            return step_seconds(config, shapes, config.train.batch_size, best_device())
        finally:
            torch.set_num_threads(before)

    return measure, workers


def _command(
    preset: str | None, tuning: Tuning, data: str | None, holdout: float | None, steps: int | None, settings: list[str]
) -> str:
    best = tuning.best.config
    words = ["scalelong", "train", *([preset] if preset else []), "--scaling", best.scaling.word]
    options = {"--data": data, "--holdout": holdout, "--steps": steps}
    words += [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    for setting in [*settings, f"train.lr={best.train.lr:g}"]:
        words += ["--set", setting]
    return shlex.join(words)


def _as_dict(tuning: Tuning) -> dict[str, Any]:
    from dataclasses import asdict

    result = tuning.result
    against = {name: None if (gap := result.gap(name)) is None else asdict(gap) for name in _compared(tuning)}
    return {**asdict(result), "tied": list(result.tied), "runner_up": result.runner_up, "against": against}


def _compared(tuning: Tuning) -> list[str]:
    """The candidates that the best one is compared with in words: no scaling, and the runner-up."""
    result = tuning.result
    plain = [c.name for c in tuning.candidates if c.config.scaling.is_identity]
    plain = [name for name in plain if tuning.best.config.train.lr == tuning.lr(name)] or plain
    names = [*plain[:1], *([result.runner_up] if result.runner_up else [])]
    return [name for name in dict.fromkeys(names) if name != result.best]


def _verdicts(tuning: Tuning) -> list[str]:
    result, lines = tuning.result, []
    for name in _compared(tuning):
        gap, who = result.gap(name), "no scaling" if name == "none" else name
        who += " (the runner-up)" if name == result.runner_up else ""
        if gap is None:
            lines.append(f"against {who}: {result[name].dropped}")
            continue
        low, high = (None if end is None else -end for end in (gap.loss.high, gap.loss.low))
        change = with_interval(-gap.loss.mean, low, high, 3)
        lines.append(f"{result.best} against {who}: loss {change} at step {gap.steps:,}")
    if result.tied:
        lines.append(f"no difference worth choosing between {result.best} and {', '.join(result.tied)}")
    if len(tuning.seeds) == 1 and result.runner_up:
        lines.append("one seed: there is no interval, and the order may be chance; --seeds 3 gives intervals")
    return lines


def _rows(tuning: Tuning) -> list[list[str]]:
    rows, result = [], tuning.result
    for s in result.standings:
        gap = "" if s.worse_by is None else with_interval(s.worse_by.mean, s.worse_by.low, s.worse_by.high, 3)
        why = s.dropped or ("best" if s.name == result.best else "")
        rows.append([s.name, f"{s.steps:,}", number(s.loss), gap, why])
    return rows


def _share(tuning: Tuning) -> str:
    result = tuning.result
    return f"{result.steps:,} steps, {result.steps / result.grid_steps:.0%} of the full grid"


def _print(tuning: Tuning, command: str, confidence: float) -> None:
    print_table(_share(tuning), COLUMNS, _rows(tuning), left=1)
    survives = f"the best candidate survives every rung with {confidence:.0%} if the losses of all vary alike"
    note = f"losses of the EMA weights; differences are paired by seed; {survives}"
    print_lines([f"best: {tuning.result.best}", *_verdicts(tuning), note, f"train with it: {command}"])


def write_page(tuning: Tuning, folder: Path, command: str, facts: list[str]) -> Path:
    """Write OUT/report.html: the search, and the report of the runs that were trained furthest."""
    from scalelong.report.figures import draw_rungs, save_figure
    from scalelong.report.findings import Findings
    from scalelong.report.page import Choice, write_choice

    result, picture = tuning.result, folder / "rungs.png"
    save_figure(draw_rungs(result, "validation loss, EMA", "step", "loss"), picture)
    furthest = [folder / f"{name}-seed{seed}" for name in result.rungs[-1].losses for seed in tuning.seeds]
    headline = f"{result.best} is best of {len(result.standings)}"
    if result.tied:
        headline = f"No difference worth choosing: {result.best} has the lowest loss of {len(result.standings)}"
    elif len(tuning.seeds) == 1:
        headline = f"{result.best} has the lowest loss of {len(result.standings)}, with one seed"
    caption = "Left: mean over seeds at every rung; dashed: dropped. Right: paired differences with their intervals."
    summary, share = Findings(headline, tuple(_verdicts(tuning))), _share(tuning)
    choice = Choice(summary, ["scalelong tune", *facts, share], COLUMNS, _rows(tuning), command, {caption: picture})
    return write_choice(choice, folder / "report.html", furthest)
