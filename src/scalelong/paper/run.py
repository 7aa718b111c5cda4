"""Running an item: train what is missing, analyse, judge, and write results/paper/ITEM.json and .png."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError, unknown
from scalelong.files import write_text
from scalelong.paper.item import SIZES, Item
from scalelong.paper.study import Study
from scalelong.paper.verdict import VERDICTS

if TYPE_CHECKING:
    from scalelong.paper.trained import Trained

FORMAT = 1
RUNS = Path("runs") / "paper"
RESULTS = Path("results") / "paper"


@dataclass(frozen=True)
class Options:
    """How an item is run. `steps` and `seeds` None: the studies' own."""

    size: str = "cpu"
    runs: Path = RUNS
    results: Path = RESULTS
    seeds: tuple[int, ...] | None = None
    steps: int | None = None
    jobs: int | None = None
    train: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        if self.steps is not None and self.steps < 1:
            raise ScaleLongError(f"--steps is at least 1, not {self.steps}")


class StoppedError(Exception):
    """A signal stopped the training; the same command goes on."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


def result_name(item: Item, options: Options) -> str:
    """figure-1; other sizes, steps and seeds than the studies' own do not take its place."""
    parts = [item.name]
    parts += ["paper"] if options.size == "paper" else []
    parts += [f"{options.steps}-steps"] if options.steps is not None else []
    parts += [f"seeds-{'-'.join(map(str, options.seeds))}"] if options.seeds is not None else []
    return "-".join(parts)


def run_item(item: Item, options: Options) -> dict[str, Any]:
    """Train (unless `train` is False), read, analyse, judge, write. Returns what the JSON file holds."""
    from scalelong.paper.drawing import save_figure
    from scalelong.paper.trained import read_trained

    failures = [line for study in item.studies(options.size) for line in train_study(study, options)]
    read = [read_trained(study, options.runs, options.seeds, options.steps) for study in item.studies(options.size)]
    missing = [name for trained in read for name in trained.missing]
    present = [trained for trained in read if trained.runs]
    if read and not present:
        raise ScaleLongError(
            f"{item.name}: none of its {len(missing)} runs is finished in {options.runs}; "
            f"`scalelong paper {item.name}` without --no-train trains them"
        )
    outcome = item.analyse(present, options.size)
    name = result_name(item, options)
    result = {
        "format": FORMAT,
        "item": item.name,
        "title": item.title,
        "paper_shows": item.shows,
        "size": options.size,
        "differs": item.differs if options.size == "cpu" else "",
        "complete": not missing,
        "runs": sum(len(trained.runs) for trained in read),
        "missing": missing,
        "failures": failures,
        "studies": [
            {"name": t.study.name, "steps": t.steps, "seeds": list(t.seeds), "variants": list(t.variants)} for t in read
        ],
        "processor_minutes": _minutes(present),
        "claims": [claim.to_dict() for claim in outcome.claims],
        "verdicts": {v: sum(claim.verdict == v for claim in outcome.claims) for v in VERDICTS},
        "tables": [table.to_dict() for table in outcome.tables],
        "notes": list(outcome.notes),
        "figure": f"{name}.png",
        "data": outcome.data,
    }
    save_figure(item, outcome.data, options.results / f"{name}.png")
    write_text(options.results / f"{name}.json", to_json(result))
    return result


def to_json(result: dict[str, Any]) -> str:
    """One line a number list, so that the files stay readable and small."""
    head = {key: value for key, value in result.items() if key != "data"}
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False)
    data = json.dumps(result["data"], ensure_ascii=False, allow_nan=False)
    return f'{text[:-2]},\n "data": {data}\n}}\n'


def read_result(path: Path) -> dict[str, Any] | None:
    """What an item's JSON file holds, or None where there is none."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ScaleLongError(f"{path} cannot be read: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ScaleLongError(f"{path} is not a result of `scalelong paper` (format {FORMAT})")
    return facts


def train_study(study: Study, options: Options) -> list[str]:
    """Train what is missing of a study; how runs failed, in words."""
    if not options.train:
        return []
    from scalelong.experiments.compare import run_comparison

    result = run_comparison(
        study.variants(options.steps), study.seeds if options.seeds is None else options.seeds,
        study.folder(options.runs, options.steps), distance=study.spec(), jobs=options.jobs, quiet=options.quiet,
    )  # fmt: skip
    if result.signal is not None:
        raise StoppedError(result.signal)
    return [f"{study.name}/{e.job.name} {e.reason()}" for e in result.failures]


def _minutes(read: Sequence[Trained]) -> float | None:
    """Processor minutes of all runs; None where one of them does not tell."""
    seconds = [run.values.get("cpu_seconds") for trained in read for run in trained.runs]
    return None if None in seconds else round(sum(s for s in seconds if s is not None) / 60, 1)
