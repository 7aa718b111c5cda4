"""Run an item: train what is missing, analyse, judge, write results/paper/ITEM.json and .png. Also: what it costs."""

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalelong.errors import RunError, invalid, unknown
from scalelong.files import read_json, write_text
from scalelong.paper.items import SIZES, Item
from scalelong.paper.judge import VERDICTS
from scalelong.paper.study import Study, read_trained
from scalelong.scaling import NoScaling

FORMAT = 1
RUNS = Path("runs") / "paper"
RESULTS = Path("results") / "paper"

GPU = "A100, 312 TFLOP/s in fp16"
PEAK = 312e12  # FLOP/s
UTILIZATION = 0.35
CORES = 2


@dataclass(frozen=True)
class Options:
    """How to run an item. `steps` and `seeds` None: those of its studies."""

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
            raise invalid("--steps", "an integer >= 1", self.steps)

    def studies(self, item: Item) -> list[Study]:
        return item.studies(self.size, self.seeds, self.steps)


class StoppedError(Exception):
    """A signal stopped the training; the same command resumes it. The argument is the signal's number."""


def result_name(item: Item, options: Options) -> str:
    """Return `figure-1`; another size, other steps or other seeds get a name of their own."""
    parts = [item.name]
    parts += ["paper"] if options.size == "paper" else []
    parts += [f"{options.steps}-steps"] if options.steps is not None else []
    parts += [f"seeds-{'-'.join(map(str, options.seeds))}"] if options.seeds is not None else []
    return "-".join(parts)


def run_item(item: Item, options: Options) -> dict[str, Any]:
    """Train (unless `options.train` is False), read, analyse, judge, write. Returns the content of the JSON file."""
    from scalelong.report.figures import new_figure, save_figure

    studies = options.studies(item)
    failures = [line for study in studies for line in train_study(study, options)] if options.train else []
    read = [read_trained(study, options.runs) for study in studies]
    missing = [name for trained in read for name in trained.missing]
    finished = [trained for trained in read if trained.runs]
    if read and not finished:
        raise RunError(
            f"{item.name}: none of its {len(missing)} runs is finished in {options.runs}; "
            f"train them with `scalelong paper {item.name}`, without --no-train"
        )
    outcome = item.analyse(finished, options.size)
    seconds = [run.values.get("cpu_seconds") for trained in finished for run in trained.runs]
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
            {"name": t.study.name, "steps": t.study.steps, "seeds": t.study.seeds, "variants": t.variants} for t in read
        ],
        "processor_minutes": None if None in seconds else round(sum(filter(None, seconds)) / 60, 1),
        "claims": [claim.to_dict() for claim in outcome.claims],
        "verdicts": {v: sum(claim.verdict == v for claim in outcome.claims) for v in VERDICTS},
        "tables": [asdict(table) for table in outcome.tables],
        "notes": outcome.notes,
        "figure": f"{name}.png",
        "data": outcome.data,
    }
    figure = new_figure(*item.inches)
    item.draw(outcome.data, figure)
    save_figure(figure, options.results / f"{name}.png", dpi=120)
    write_text(options.results / f"{name}.json", to_json(result))
    return result


def train_study(study: Study, options: Options) -> list[str]:
    """Train the missing runs of a study. Returns a description of every failure."""
    from scalelong.experiments.campaign import PLAN, read_plan, run_missing
    from scalelong.experiments.compare import run_comparison

    if study.records is not None and (study.records / PLAN).exists():
        if run_missing(read_plan(study.records), options.runs, options.jobs, quiet=options.quiet):
            raise StoppedError(signal.SIGTERM)
        return []
    result = run_comparison(
        study.variants(), study.seeds, options.runs / study.name, distance=study.distance, jobs=options.jobs,
        quiet=options.quiet,
    )  # fmt: skip
    if result.signal is not None:
        raise StoppedError(result.signal)
    return [f"{study.name}/{ending.job.name} {ending.reason()}" for ending in result.failures]


def to_json(result: dict[str, Any]) -> str:
    """Serialize with `data` on one line, so that files stay readable and small."""
    head = {key: value for key, value in result.items() if key != "data"}
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False)
    data = json.dumps(result["data"], ensure_ascii=False, allow_nan=False)
    return f'{text[:-2]},\n "data": {data}\n}}\n'


def read_result(path: Path) -> dict[str, Any] | None:
    """Read an item's JSON file; None if there is none."""
    if not path.exists():
        return None
    result = read_json(path)
    if result is None or result.get("format") != FORMAT:
        raise RunError(f"{path} is not a result in format {FORMAT}; write it again with `scalelong paper`")
    return result


def cost_of(study: Study, size: str) -> dict[str, float]:
    """Return the FLOP per step of the unscaled network, and the hours of one GPU or CPU core for all runs.

    Scaling adds less than a thousandth to the FLOP.
    """
    from scalelong.training.presets import size_of

    network = size_of(study.config(NoScaling()))
    runs, flop = len(study.scalings) * len(study.seeds), float(network["flop_per_step"])
    seconds = study.seconds if size == "cpu" else study.steps * flop / (PEAK * UTILIZATION)
    return {"runs": runs, "batch": network["batch_size"], "flop": flop, "hours": runs * seconds / 3600}


def minutes_on_two_cores(item: Item, studies: Sequence[Study] | None = None) -> float:
    """Estimate the minutes of a CPU item if nothing is trained yet; items that share runs take less."""
    return sum(len(s.scalings) * len(s.seeds) * s.seconds for s in studies or item.cpu) / 60 / CORES + item.minutes


def describe_cost(item: Item, options: Options) -> list[str]:
    """Describe the cost, one line per study and one for the total."""
    studies = options.studies(item)
    costs = [cost_of(study, options.size) for study in studies]
    lines = []
    for study, cost in zip(studies, costs, strict=True):
        hours = cost["hours"]
        amount = f"{hours:,.0f} GPU-hours" if options.size == "paper" else f"{60 * hours:.0f} min of one core"
        lines.append(
            f"{study.name}: {cost['runs']} runs × {study.steps:,} steps of {cost['batch']} images, "
            f"{cost['flop'] / 1e12:.3g} TFLOP per step: {amount}"
        )
    if options.size == "paper":
        total = (
            f"{sum(cost['hours'] for cost in costs):,.0f} GPU-hours on one {GPU}, at {UTILIZATION:.0%} utilization, "
            "for training without validation, samples and FID. The paper's own 6.7 h for 200,000 steps of 32 CIFAR-10 "
            "images are about 6 % of the peak, so it may take several times as long"
        )
    else:
        total = f"about {minutes_on_two_cores(item, studies):.0f} min on {CORES} cores, including runs that items share"
    return [*lines, f"total: {total}"]
