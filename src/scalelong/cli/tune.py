"""`scalelong tune`: find the scaling, κ and learning rate of a preset within a budget."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from scalelong._text import number, with_interval
from scalelong.cli._shared import (
    DataName,
    Jobs,
    Json,
    PresetName,
    Quiet,
    Settings,
    comma_words,
    echo_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    from scalelong.experiments.tuning import Tuning


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
    settings: Settings = None,
    jobs: Jobs = None,
    out: Annotated[Path | None, Option(help="Folder of the runs; the same command resumes.")] = None,
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
    from scalelong.experiments.scheduler import usable_cores, visible_gpus
    from scalelong.experiments.tuning import candidates_of, parse_budget, time_step, tune_preset
    from scalelong.training.presets import choose, start_name

    if not 0 < confidence < 1:
        raise invalid("--confidence", "in (0, 1)", confidence)
    config, chosen = choose(preset or "digits", data=data, steps=steps, settings=settings), parse_seeds(seeds)
    found = candidates_of(config, comma_words(over), scalings)
    grid = len(found) * config.train.steps * len(chosen)
    workers = jobs or len(visible_gpus()) or usable_cores()
    total = grid // 3 if budget is None else parse_budget(budget, lambda: time_step(found[0].config), workers)
    folder = out or Path("runs") / f"tune-{start_name(config)}"
    if not json and not quiet:
        budget_text = f"at most {total:,} steps ({total / grid:.0%} of the full grid)"
        print_lines([f"{len(found)} candidates × {len(chosen)} seeds, {budget_text}, in {folder}"])
    options: dict[str, Any] = {"confidence": confidence, "jobs": jobs, "quiet": quiet or json}
    tuning = tune_preset(found, chosen, folder, budget=total, **options)
    command = _command(config.preset, tuning, data, steps)
    if json:
        echo_json({**_as_dict(tuning), "command": command})
    else:
        _print(tuning, command, confidence)


def _command(preset: str, tuning: Tuning, data: str | None, steps: int | None) -> str:
    best = tuning.best.config
    words = ["scalelong", "train", preset, "--scaling", _word(best.scaling), "--set", f"train.lr={best.train.lr:g}"]
    words += ["--data", data] if data else []
    words += ["--steps", str(steps)] if steps else []
    return shlex.join(words)


def _word(scaling: Any) -> str:
    value = scaling.to_dict()
    kappa = value.get(scaling.kappa_option) if scaling.kappa_option else None
    return scaling.kind if kappa is None else f"{scaling.kind}:{kappa:g}"


def _as_dict(tuning: Tuning) -> dict[str, Any]:
    from dataclasses import asdict

    result = tuning.result
    return {**asdict(result), "tied": list(result.tied)}


def _print(tuning: Tuning, command: str, confidence: float) -> None:
    result = tuning.result
    rows = []
    for s in result.standings:
        gap = "" if s.worse_by is None else with_interval(s.worse_by.mean, s.worse_by.low, s.worse_by.high, 3)
        rows.append(
            [s.name, f"{s.steps:,}", number(s.loss), gap, s.dropped or ("best" if s.name == result.best else "")]
        )
    columns = ("candidate", "steps", "validation loss", "worse than the best by", "")
    share = f"{result.steps:,} steps, {result.steps / result.grid_steps:.0%} of the full grid"
    print_table(share, columns, rows, left=1)
    tied = ", ".join(result.tied)
    lines = [f"best: {result.best}" + (f"; no difference worth choosing to {tied}" if tied else "")]
    lines.append(
        "losses of the EMA weights; differences are paired by seed, their intervals hold together for all candidates "
        f"and rungs with {confidence:.0%}"
    )
    print_lines([*lines, f"train with it: {command}"])
