"""Run an item: train what is missing, analyse, judge, write results/paper/ITEM.json and .png."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalelong.errors import RunError, invalid, unknown
from scalelong.files import read_json, write_text
from scalelong.paper.items import SIZES, Item
from scalelong.paper.judge import VERDICTS
from scalelong.paper.study import Study, read_trained

FORMAT = 1
RUNS = Path("runs") / "paper"
RESULTS = Path("results") / "paper"


@dataclass(frozen=True)
class Options:
    """How to run an item. `steps` and `seeds` None: those of its studies; `study` None: all of them."""

    size: str = "cpu"
    runs: Path = RUNS
    results: Path = RESULTS
    seeds: tuple[int, ...] | None = None
    steps: int | None = None
    study: str | None = None  # the only one to run
    jobs: int | None = None
    gpus: int = 1  # of one run
    memory: float | None = None  # GiB of one GPU
    train: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        if self.steps is not None and self.steps < 1:
            raise invalid("--steps", "an integer >= 1", self.steps)

    def studies(self, item: Item) -> list[Study]:
        """Return the studies, whose runs fit on the GPUs if their memory is known."""
        studies = item.studies(self.size, self.seeds, self.steps)
        if self.study is not None:
            named = {study.name.removesuffix(f"-{self.steps}-steps"): study for study in studies}
            if self.study not in named:
                raise unknown(f"study of {item.name} at size {self.size}:", self.study, list(named))
            studies = [named[self.study]]
        memory = None if self.size == "cpu" else self.memory or visible_memory()
        return studies if memory is None else [study.fitted(self.gpus, memory) for study in studies]


def visible_memory() -> float | None:
    """Return the GiB of this machine's first GPU, None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None


class StoppedError(Exception):
    """A signal stopped the training; the same command resumes it. The argument is the signal's number."""


def result_name(item: Item, options: Options) -> str:
    """Return `figure-1`; another size, a single study, other steps or other seeds get a name of their own."""
    parts = [item.name]
    parts += ["paper"] if options.size == "paper" else []
    parts += [options.study] if options.study is not None else []
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
        if not read_trained(study, options.runs).missing:
            return []
        campaign = read_plan(study.records)
        worked = run_missing(campaign, options.runs, options.jobs, quiet=options.quiet, gpus=options.gpus)
        if worked.signal is not None:
            raise StoppedError(worked.signal)
        return [f"{study.name}/{ending.job.name} {ending.reason()}" for ending in worked.failures]
    result = run_comparison(
        study.variants(), study.seeds, options.runs / study.name, distance=study.distance, jobs=options.jobs,
        gpus=options.gpus, quiet=options.quiet,
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
