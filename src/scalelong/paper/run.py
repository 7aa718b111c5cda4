"""Run an item: train what is missing, analyse, judge, write results/paper/ITEM.json and .png. Also: what it costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalelong.errors import RunError, invalid, unknown
from scalelong.files import write_text
from scalelong.paper.items import SIZES, Item
from scalelong.paper.judge import VERDICTS
from scalelong.paper.study import Study, Trained, read_trained
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


class StoppedError(Exception):
    """A signal stopped the training; the same command resumes it."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


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

    failures = [line for study in item.studies(options.size) for line in train_study(study, options)]
    read = [read_trained(study, options.runs, options.seeds, options.steps) for study in item.studies(options.size)]
    missing = [name for trained in read for name in trained.missing]
    finished = [trained for trained in read if trained.runs]
    if read and not finished:
        raise RunError(
            f"{item.name}: none of its {len(missing)} runs is finished in {options.runs}; "
            f"train them with `scalelong paper {item.name}`, without --no-train"
        )
    outcome = item.analyse(finished, options.size)
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
        "processor_minutes": _cpu_minutes(finished),
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
    if not options.train:
        return []
    from scalelong.experiments.compare import run_comparison

    result = run_comparison(
        study.variants(options.steps), study.seeds if options.seeds is None else options.seeds,
        study.folder(options.runs, options.steps), distance=study.distance_spec(), jobs=options.jobs,
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
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"could not read {path}: {error}; write it again with `scalelong paper`") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise RunError(f"{path} is not a result of `scalelong paper`: expected format {FORMAT}")
    return result


def _cpu_minutes(read: Sequence[Trained]) -> float | None:
    """Return the CPU minutes of all runs; None if one of them has no record."""
    seconds = [run.values.get("cpu_seconds") for trained in read for run in trained.runs]
    return None if None in seconds else round(sum(s for s in seconds if s is not None) / 60, 1)


# ------------------------------------------------------------------------------------------------------------ cost


@dataclass(frozen=True)
class Cost:
    """The cost of one study: FLOP per step, and the hours of one GPU or CPU core for all of its runs."""

    study: Study
    runs: int
    steps: int
    batch: int
    flop: float
    hours: float


def cost_of(study: Study, size: str, seeds: Sequence[int] | None = None, steps: int | None = None) -> Cost:
    """Estimate the cost from the FLOP of the unscaled network; scaling adds less than a thousandth."""
    from scalelong.training.presets import size_of

    steps = steps or study.steps
    network = size_of(study.config(NoScaling(), steps))
    runs = len(study.scalings) * len(study.seeds if seeds is None else seeds)
    seconds = (study.seconds or 0.0) / study.steps if size == "cpu" else network["flop_per_step"] / (PEAK * UTILIZATION)
    return Cost(
        study, runs, steps, network["batch_size"], float(network["flop_per_step"]), runs * steps * seconds / 3600
    )


def minutes_on_two_cores(item: Item) -> float:
    """Estimate the minutes of a CPU item if nothing is trained yet; items that share runs take less."""
    training = sum(len(s.scalings) * len(s.seeds) * (s.seconds or 0.0) for s in item.cpu) / 60
    return training / CORES + item.minutes


def describe_cost(item: Item, size: str, seeds: Sequence[int] | None = None, steps: int | None = None) -> list[str]:
    """Describe the cost, one line per study and one for the total."""
    costs = [cost_of(study, size, seeds, steps) for study in item.studies(size)]
    hours = sum(cost.hours for cost in costs)
    lines = []
    for cost in costs:
        amount = f"{cost.hours:,.0f} GPU-hours" if size == "paper" else f"{60 * cost.hours:.0f} min of one core"
        lines.append(
            f"{cost.study.name}: {cost.runs} runs × {cost.steps:,} steps of {cost.batch} images, "
            f"{cost.flop / 1e12:.3g} TFLOP per step: {amount}"
        )
    if size == "paper":
        total = (
            f"{hours:,.0f} GPU-hours on one {GPU}, at {UTILIZATION:.0%} utilization, for training without validation, "
            "samples and FID. The paper's own 6.7 h for 200,000 steps of 32 CIFAR-10 images are about 6 % of the peak, "
            "so it may take several times as long"
        )
    else:
        total = f"about {60 * hours / CORES + item.minutes:.0f} min on {CORES} cores, including runs that items share"
    return [*lines, f"total: {total}"]
