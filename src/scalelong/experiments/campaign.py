"""A campaign: a written plan of runs that is worked off over many sessions, each run leaving a small record to commit.

FOLDER/plan.toml states question, arms, seeds, measures and the rule before the first run. `run_missing` trains the runs
without a record, two or more side by side; a finished run writes FOLDER/ARM-seedN.json. Run folders are only needed
while a run trains.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import InvalidValueError, invalid, unknown
from scalelong.experiments.frontier import OPTIMIZERS
from scalelong.experiments.plan import Job
from scalelong.experiments.rounding import PRECISIONS, ROUNDED, register_rounded
from scalelong.files import read_json
from scalelong.runs.config import Config, differences, measured_differently
from scalelong.training.presets import choose

if TYPE_CHECKING:
    from scalelong.experiments.scheduler import Ending

PLAN, FORMAT = "plan.toml", 1
RECORDED = {"arm", "seed", "failure", "config", "optimizer", "rounding", "values", "alarms", "curves", "norms"}
TUNING = "tune"
# What the paper's statement predicts of variant/baseline: a ratio below 1, or an acceleration of at least 1.5.
CLAIMS = {
    "norm_outer": "smaller norm at the outer joins (Fig. 1)",
    "norm_inner": "smaller norm at the inner joins (Fig. 1)",
    "absolute_outer": "smaller absolute oscillation at the outer joins (Fig. 1)",
    "absolute_inner": "smaller absolute oscillation at the inner joins (Fig. 1)",
    "feature_oscillation": "smaller relative oscillation of features (ours)",
    "val_loss_ema": "lower validation loss at the end",
    "kid": "lower KID at the end",
    "fid": "lower FID at the end",
}
SOONER = "acceleration"


@dataclass(frozen=True)
class Arm:
    """One line of the plan. `baseline` is the arm that it is compared with, by default the plan's first arm."""

    name: str
    scaling: str
    group: int = 1
    preset: str | None = None
    baseline: str | None = None
    settings: tuple[str, ...] = ()
    optimizer: str = "adamw"
    factors: dict[str, Any] = field(default_factory=dict)  # of a designed experiment: factor → level
    rounding: str | None = None  # fp32, bf16 or fp16: see `scalelong.experiments.rounding`


@dataclass(frozen=True)
class Tuning:
    """Short runs of every arm at the same learning rates; the one with the lowest validation loss (EMA) is used."""

    lr: tuple[float, ...]
    steps: int
    seed: int


@dataclass(frozen=True)
class Distance:
    """Sample distances to a split of the data: KID of `n` samples every `every` steps, all metrics of `final` at the
    end. 0 for `every` or `final` measures none there.
    """

    every: int
    n: int
    final: int
    evaluations: int
    extractor: str = "inception"
    sampler: str = "dpm-solver++"
    reference: str = "test"
    reference_n: int = 10_000


@dataclass(frozen=True)
class Plan:
    """A plan.toml: see docs/campaign.md for its keys."""

    folder: Path
    title: str
    question: str
    rule: str
    preset: str
    steps: int
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    settings: tuple[str, ...] = ()
    known: str = ""
    judged: tuple[str, ...] = ()  # of CLAIMS and SOONER, those that the rule judges; empty: all
    tuning: Tuning | None = None
    distance: Distance | None = None

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def baseline_of(self, arm: Arm) -> str:
        return arm.baseline or self.arms[0].name

    def config(self, arm: Arm, seed: int, lr: float | None = None, steps: int | None = None) -> Config:
        """The config of a run."""
        rate = [] if lr is None else [f"train.lr={lr!r}"]
        config = choose(
            arm.preset or self.preset, scaling=arm.scaling, steps=steps or self.steps, seed=seed,
            settings=[*self.settings, *arm.settings, *rate],
        )  # fmt: skip
        if arm.rounding is not None:
            register_rounded()
            config = replace(config, model=replace(config.model, kind=ROUNDED, options={"rounding": arm.rounding}))
        return config

    @cached_property
    def planned(self) -> tuple[str, ...]:
        """The names of all main runs, group by group, then seed by seed."""
        return tuple(_name(arm, seed) for arm, seed in self._order())

    def _order(self) -> Iterator[tuple[Arm, int]]:
        for group in sorted({arm.group for arm in self.arms}):
            for seed in self.seeds:
                yield from ((arm, seed) for arm in self.arms if arm.group == group)

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a finished run, None if it has none."""
        record = read_json(path := self.folder / f"{name}.json")
        if record is None and not path.exists():
            return None
        if record is None or record.get("format") != FORMAT or not record.keys() >= RECORDED or not _measured(record):
            raise InvalidValueError(
                f"{path} is not a whole record in format {FORMAT}; restore it (git checkout), or delete it to "
                "train the run again"
            )
        return record

    def names(self, arm: Arm) -> list[str]:
        """The names of all runs of an arm: those that tune it, and the main ones."""
        tuning = [] if self.tuning is None else [_tuning_name(arm, lr, self.tuning.seed) for lr in self.tuning.lr]
        return [*tuning, *(_name(arm, seed) for seed in self.seeds)]

    def tuning_losses(self, arm: Arm) -> dict[float, float]:
        """Learning rate → validation loss (EMA) at the end of each finished tuning run, inf where the run failed."""
        assert self.tuning is not None
        losses = {}
        for lr in self.tuning.lr:
            if (record := self.record(_tuning_name(arm, lr, self.tuning.seed))) is not None:
                value = record["values"].get("val_loss_ema")
                losses[lr] = math.inf if value is None or record["failure"] else float(value)
        return losses

    def learning_rate(self, arm: Arm) -> float | None:
        """The tuned learning rate; None while tuning runs are missing, and if the arm trains at none of them."""
        assert self.tuning is not None
        losses = self.tuning_losses(arm)
        if len(losses) < len(self.tuning.lr) or not any(map(math.isfinite, losses.values())):
            return None
        return min(losses, key=lambda lr: losses[lr])

    @property
    def untrainable(self) -> list[str]:
        """The arms that train at none of the plan's learning rates. That is a result: their main runs are left out."""
        if self.tuning is None:
            return []
        found = {arm.name: self.tuning_losses(arm) for arm in self.arms}
        count = len(self.tuning.lr)
        return [n for n, own in found.items() if len(own) == count and not any(map(math.isfinite, own.values()))]

    def check_arms(self, names: Collection[str]) -> None:
        """Raise an error that lists the arms if a name is not one of them."""
        known = [arm.name for arm in self.arms]
        for name in names:
            if name not in known:
                raise unknown("arm", name, known)

    def missing(self, runs: Path, arms: Collection[str] = ()) -> list[Job]:
        """The jobs that can start now, of `arms` or of all. An arm's main runs wait for its own tuning runs, and later
        groups for those of earlier ones.
        """
        self.check_arms(arms)
        jobs: dict[str, Job] = {}
        tuned: int | None = None  # the group whose tuning runs are missing
        untrainable = self.untrainable
        for arm, seed in self._order():
            if (arms and arm.name not in arms) or arm.name in untrainable:
                continue
            if tuned is not None and arm.group != tuned:
                break
            wanted: list[tuple[str, int, float | None, int]]  # name, seed, learning rate, steps
            if (t := self.tuning) is not None and self.learning_rate(arm) is None:
                tuned = arm.group
                wanted = [(_tuning_name(arm, rate, t.seed), t.seed, rate, t.steps) for rate in t.lr]
            else:
                wanted = [(_name(arm, seed), seed, None if t is None else self.learning_rate(arm), self.steps)]
            for name, number, lr, steps in wanted:
                if name not in jobs and not (self.folder / f"{name}.json").exists():
                    jobs[name] = self._job(runs, name, arm, self.config(arm, number, lr, steps))
        return list(jobs.values())

    def _job(self, runs: Path, name: str, arm: Arm, config: Config) -> Job:
        tuning = name.startswith(f"{TUNING}-")
        record = {
            "path": str(self.folder / f"{name}.json"), "campaign": self.folder.name, "arm": arm.name, "tuning": tuning,
            "command": f"scalelong campaign {self.folder.as_posix()}", "optimizer": arm.optimizer,
            "rounding": arm.rounding, "distance": None if tuning or self.distance is None else asdict(self.distance),
        }  # fmt: skip
        label = name.rpartition("-seed")[0]
        return Job(label, config.seed, config, runs / self.folder.name / name, record=record)


def _name(arm: Arm, seed: int) -> str:
    return f"{arm.name}-seed{seed}"


def _tuning_name(arm: Arm, lr: float, seed: int) -> str:
    return f"{TUNING}-{arm.name}-lr{lr:g}-seed{seed}"


def _measured(record: dict[str, Any]) -> bool:
    """Whether the values of a record are numbers, or None where a measure is missing."""
    values = record["values"]
    return isinstance(values, dict) and all(v is None or type(v) in (int, float) for v in values.values())


def read_plan(folder: Path | str) -> Plan:
    """Read FOLDER/plan.toml and check every config in it."""
    path = Path(folder) / PLAN
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidValueError(f"{path} does not exist; docs/campaign.md describes it") from None
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"cannot read {path}: {error}") from None
    try:
        arms = tuple(_build(Arm, arm) for arm in values.pop("arms"))
        parts = {
            key: _build(kind, values.pop(key))
            for key, kind in (("tuning", Tuning), ("distance", Distance))
            if key in values
        }
        plan = _build(Plan, {"folder": Path(folder), "arms": arms, **parts, **values})
    except (KeyError, TypeError) as error:
        raise InvalidValueError(f"{path}: missing or wrong entry {error}") from None
    _check_values(plan, path)
    names = [arm.name for arm in plan.arms]
    for key in plan.judged:
        if key not in (*CLAIMS, SOONER):
            raise unknown(f"{path}: judged", key, (*CLAIMS, SOONER))
    for arm in plan.arms:
        if plan.baseline_of(arm) not in names:
            raise unknown(f"baseline of arm {arm.name!r}:", arm.baseline or "", names)
        try:
            every = plan.config(arm, plan.seeds[0]).validate.every
        except InvalidValueError as error:
            raise InvalidValueError(f"{path}: arm {arm.name!r}: {error}") from None
        if plan.distance is not None and plan.distance.every % (every or plan.steps):
            raise invalid(f"{path}: distance.every", f"a multiple of validate.every of {arm.name}", plan.distance.every)
        _check_records(plan, arm)
    return plan


def _check_values(plan: Plan, path: Path) -> None:
    """Refuse values that no run can have, before the first one starts."""
    from scalelong.diffusion.samplers import get_sampler
    from scalelong.evaluation.extractors import EXTRACTORS

    names, seeds = [arm.name for arm in plan.arms], plan.seeds

    def check(key: str, holds: bool, expected: str, value: Any) -> None:
        if not holds:
            raise invalid(f"{path}: {key}", expected, value)

    def counts(values: Any, least: int) -> bool:
        return isinstance(values, tuple) and all(type(value) is int and value >= least for value in values)

    texts = ("title", "question", "rule", "preset")
    for key in texts:
        check(key, isinstance(getattr(plan, key), str), "a text", getattr(plan, key))
    check("arms", bool(names) and len(set(names)) == len(names), "one or more arms with different names", names)
    check("seeds", counts(seeds, 0) and len(set(seeds)) == len(seeds) > 0, "one or more different seeds", seeds)
    check("steps", counts((plan.steps,), 1), "an integer >= 1", plan.steps)
    own = {"seed": "seeds", "train.steps": "steps", "scaling": "the arm's `scaling`"}
    for name, words in [("settings", plan.settings), *((f"settings of {arm.name}", arm.settings) for arm in plan.arms)]:
        listed = isinstance(words, tuple) and all(isinstance(word, str) for word in words)
        check(name, listed, 'a list such as ["train.lr=0.001"]', words)
        for key in (word.partition("=")[0].strip() for word in words):
            check(name, key not in own, f"settings without {key}, which {own.get(key)} of the plan gives", list(words))
    for arm in plan.arms:
        check(f"group of {arm.name}", type(arm.group) is int, "an integer", arm.group)
        check(f"factors of {arm.name}", isinstance(arm.factors, dict), "a table, such as { depth = 12 }", arm.factors)
        check(f"optimizer of {arm.name}", isinstance(arm.optimizer, str), "a name", arm.optimizer)
        named = isinstance(arm.name, str) and re.fullmatch(r"\w[\w.+-]*", arm.name) is not None
        named = named and not arm.name.startswith(f"{TUNING}-")
        check("name of an arm", named, f"letters, digits and '.+-_', not starting with {TUNING}-", arm.name)
        check(f"scaling of {arm.name}", isinstance(arm.scaling, str), "a scaling such as cs:0.5", arm.scaling)
        if arm.optimizer not in OPTIMIZERS:
            raise unknown(f"{path}: optimizer", arm.optimizer, OPTIMIZERS)
        if arm.rounding is not None and arm.rounding not in PRECISIONS:
            raise unknown(f"{path}: rounding", arm.rounding, PRECISIONS)
        same = arm.factors.keys() == plan.arms[0].factors.keys()
        check(f"factors of {arm.name}", same, "those of the other arms", list(arm.factors))
    if (t := plan.tuning) is not None:
        rates = isinstance(t.lr, tuple) and all(type(lr) in (int, float) and 0 < lr < math.inf for lr in t.lr)
        check("tuning.lr", rates and len(set(t.lr)) == len(t.lr) > 0, "different numbers > 0", t.lr)
        check("tuning.steps", counts((t.steps,), 1), "an integer >= 1", t.steps)
        check("tuning.seed", counts((t.seed,), 0) and t.seed not in seeds, "a seed that no other run has", t.seed)
    if (d := plan.distance) is not None:
        check("distance", counts((d.every, d.n, d.final), 0), "integers >= 0 for every, n, final", asdict(d))
        check("distance", counts((d.evaluations, d.reference_n), 1), "integers >= 1", asdict(d))
        check("distance.n", not d.every or d.n > 0, "an integer >= 1", d.n)
        get_sampler(d.sampler)
        if d.extractor not in EXTRACTORS:
            raise unknown(f"{path}: extractor", d.extractor, EXTRACTORS)


def _check_records(plan: Plan, arm: Arm) -> None:
    """Refuse records of other settings: the plan was amended, or the arm tuned anew, after they were made."""
    tuning, wanted = plan.tuning, dict[str, tuple[int, int, float | None]]()
    if tuning is not None:
        wanted |= {_tuning_name(arm, lr, tuning.seed): (tuning.seed, tuning.steps, lr) for lr in tuning.lr}
    chosen = None if tuning is None else plan.learning_rate(arm)
    wanted |= {_name(arm, seed): (seed, plan.steps, chosen) for seed in plan.seeds}
    for name, (seed, steps, lr) in wanted.items():
        if (record := plan.record(name)) is None:
            continue
        made = Config.from_dict(record["config"])
        if tuning is not None and lr is None:
            lr = made.train.lr  # nothing is known of it before the arm is tuned
        now = plan.config(arm, seed, lr, steps)
        changed = differences(made, now)
        distance = None if name.startswith(f"{TUNING}-") or plan.distance is None else asdict(plan.distance)
        pairs = {
            "train.steps": (made.train.steps, steps), "optimizer": (record["optimizer"], arm.optimizer),
            "rounding": (record["rounding"], arm.rounding), **measured_differently(made, now),
            "distance": (record.get("distance", distance), distance),
        }  # fmt: skip
        if record["failure"] is None:
            pairs["steps that were trained"] = (record.get("steps", steps), steps)
        changed += [f"{key}: {then!r} → {new!r}" for key, (then, new) in pairs.items() if then != new]
        if changed:
            raise InvalidValueError(
                f"{plan.folder / name}.json has other settings than the plan: {'; '.join(changed)}; move it out of the "
                "folder, and its run folder out of --runs, to train it again"
            )


def _build(kind: Any, values: dict[str, Any]) -> Any:
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(kind)}
    for key in values:
        if key not in known:
            raise unknown(f"key of {kind.__name__.lower()}:", key, known)
    for key, required in known.items():
        if required and key not in values:
            raise KeyError(key)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass(frozen=True)
class Worked:
    """How `run_missing` ended: the signal that stopped it, and the runs that crashed and so have no record."""

    signal: int | None
    failures: tuple[Ending, ...]


def run_missing(
    plan: Plan, runs: Path, jobs: int | None = None, limit: int | None = None, quiet: bool = False, gpus: int = 1,
    arms: Collection[str] = (),
) -> Worked:  # fmt: skip
    """Train what is missing (of `arms`, if given), `limit` runs at most, each on `gpus` GPUs."""
    from scalelong.experiments.compare import prepare_data
    from scalelong.experiments.live import Live
    from scalelong.experiments.scheduler import make_slots, run_jobs, usable_cores, visible_gpus

    tried: set[str] = set()

    def startable() -> list[Job]:
        left = None if limit is None else max(0, limit - len(tried))
        new = [job for job in plan.missing(runs, arms) if job.name not in tried][:left]
        tried.update(job.name for job in new)
        return new

    def more() -> list[Job]:
        new = startable()
        display.add(new)
        return new

    if not (first := startable()):
        return Worked(None, ())
    chosen = [arm for arm in plan.arms if not arms or arm.name in arms]
    left = {arm.name: [name for name in plan.names(arm) if plan.record(name) is None] for arm in chosen}
    configs = [plan.config(arm, plan.seeds[0]) for arm in chosen if left[arm.name]]
    prepare_data(configs)
    if plan.distance is not None:
        _prepare_references(configs, plan.distance)
    count = sum(map(len, left.values()))
    slots = make_slots(min(count, limit or count), jobs, visible_gpus(), usable_cores(), gpus)
    with Live(first, quiet=quiet) as display:
        endings, signal = run_jobs(first, slots, runs / plan.folder.name / "logs", display, more)
    failures = [ending for ending in endings if not ending.ran and not (ending.stopped and signal is not None)]
    return Worked(signal, tuple(failures))


def _prepare_references(configs: list[Config], distance: Distance) -> None:
    """Compute the statistics of reference images on all cores, before the runs that share them."""
    import torch

    from scalelong.experiments.campaign_run import load_reference
    from scalelong.experiments.scheduler import usable_cores

    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        for config in {config.data: config for config in configs}.values():
            load_reference(config, distance)
    finally:
        torch.set_num_threads(threads)
