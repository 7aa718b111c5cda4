"""A campaign: a written plan of runs that is worked off over many sessions, each run leaving a small record to commit.

FOLDER/plan.toml states question, arms, seeds, measures and the rule before the first run. `run_missing` trains the runs
without a record, two or more side by side; a finished run writes FOLDER/ARM-seedN.json. Run folders are only needed
while a run trains.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong.errors import InvalidValueError, invalid, unknown
from scalelong.experiments.plan import Job
from scalelong.files import read_json, write_text
from scalelong.runs.config import Config
from scalelong.runs.run import Run
from scalelong.training.presets import choose

if TYPE_CHECKING:
    from torch import nn

    from scalelong.runs.logs import Series

PLAN, FORMAT = "plan.toml", 1
ROUNDED = "uvit-rounded"
TUNING = "tune"
LARGEST_FP16 = 65_504
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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
    rounding: str | None = None  # fp32, bf16 or fp16: see `Rounding`


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
        return tuple(f"{arm.name}-seed{seed}" for arm, seed in self._order())

    def _order(self) -> Iterator[tuple[Arm, int]]:
        for group in sorted({arm.group for arm in self.arms}):
            for seed in self.seeds:
                yield from ((arm, seed) for arm in self.arms if arm.group == group)

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a finished run, None if it has none."""
        return read_json(self.folder / f"{name}.json")

    def learning_rate(self, arm: Arm) -> float | None:
        """The tuned learning rate, None while tuning runs are missing."""
        assert self.tuning is not None
        losses = {}
        for lr in self.tuning.lr:
            if (record := self.record(_tuning_name(arm, lr, self.tuning.seed))) is None:
                return None
            value = record["values"].get("val_loss_ema")
            losses[lr] = float("inf") if value is None or record["failure"] else float(value)
        return min(losses, key=lambda lr: losses[lr])

    def missing(self, runs: Path) -> list[Job]:
        """The jobs that can start now: tuning runs of a group before its main runs, which wait for them."""
        jobs: dict[str, Job] = {}
        for arm, seed in self._order():
            if self.tuning is not None and self.record(f"{arm.name}-seed{seed}") is None:
                lr, t = self.learning_rate(arm), self.tuning
                if lr is None:
                    for rate in t.lr:
                        self._add(
                            jobs, runs, _tuning_name(arm, rate, t.seed), arm, self.config(arm, t.seed, rate, t.steps)
                        )
                    continue
                self._add(jobs, runs, f"{arm.name}-seed{seed}", arm, self.config(arm, seed, lr))
            else:
                self._add(jobs, runs, f"{arm.name}-seed{seed}", arm, self.config(arm, seed))
        return list(jobs.values())

    def _add(self, jobs: dict[str, Job], runs: Path, name: str, arm: Arm, config: Config) -> None:
        path = self.folder / f"{name}.json"
        tuning = name.startswith(f"{TUNING}-")
        distance = None if tuning or self.distance is None else asdict(self.distance)
        if name not in jobs and not path.exists():
            record = {
                "path": str(path), "campaign": self.folder.name, "arm": arm.name, "tuning": tuning,
                "command": f"scalelong campaign {self.folder.as_posix()}", "optimizer": arm.optimizer,
                "rounding": arm.rounding, "distance": distance,
            }  # fmt: skip
            jobs[name] = Job(
                name.rpartition("-seed")[0], config.seed, config, runs / self.folder.name / name, record=record
            )


def _tuning_name(arm: Arm, lr: float, seed: int) -> str:
    return f"{TUNING}-{arm.name}-lr{lr:g}-seed{seed}"


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
    names = [arm.name for arm in plan.arms]
    if not names or len(set(names)) < len(names):
        raise invalid(f"{path}: arms", "one or more arms with different names", ", ".join(names))
    for arm in plan.arms:
        if plan.baseline_of(arm) not in names:
            raise unknown(f"baseline of arm {arm.name!r}:", arm.baseline or "", names)
        plan.config(arm, plan.seeds[0])
    return plan


def _build(kind: Any, values: dict[str, Any]) -> Any:
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            raise unknown(f"key of {kind.__name__.lower()}:", key, known)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def run_missing(plan: Plan, runs: Path, jobs: int | None = None, limit: int | None = None, quiet: bool = False) -> bool:
    """Train what is missing, `limit` runs at most. Returns whether a signal stopped it."""
    from scalelong.experiments.compare import _prepare_data
    from scalelong.experiments.live import Live
    from scalelong.experiments.scheduler import make_slots, run_jobs, usable_cores, visible_gpus

    tried: set[str] = set()
    while waiting := [job for job in plan.missing(runs) if job.name not in tried][: _left(limit, tried)]:
        _prepare_data(waiting)
        slots = make_slots(len(waiting), jobs, visible_gpus(), usable_cores())
        with Live(waiting, quiet=quiet) as display:
            _, signal = run_jobs(waiting, slots, runs / plan.folder.name / "logs", display)
        if signal is not None:
            return True
        tried |= {job.name for job in waiting}
    return False


def _left(limit: int | None, tried: set[str]) -> int | None:
    return None if limit is None else max(0, limit - len(tried))


# ------------------------------------------------------------------------------------------- in the worker


def run_planned(job: dict[str, Any]) -> int:
    """Train one run of a plan and write its record. A run that becomes non-finite has a record too: it is a result."""
    from scalelong.training.loop import train
    from scalelong.training.trainer import NonFiniteError

    record = job["record"]
    if record["rounding"] is not None:
        register_rounded()
    config, run = Config.from_dict(job["config"]), Run(job["folder"])
    optimizer = None if record["optimizer"] == "adamw" else partial(_sgd, config.train.lr, record["optimizer"])
    measure = Observed(run, config, None if record["distance"] is None else Distance(**record["distance"]))
    failure = None
    try:
        result = train(config, run.folder, optimizer=optimizer, metrics=measure)
        if not result.finished:
            return 128 + (result.signal or 0)
    except NonFiniteError as error:
        failure = str(error)
    values = {} if failure else measure.final()
    write_text(record["path"], json.dumps(make_record(run, record, values, failure), ensure_ascii=False) + "\n")
    return 0


def _sgd(lr: float, name: str, net: nn.Module) -> Any:
    from scalelong.experiments.frontier import OPTIMIZERS

    return OPTIMIZERS[name]([p for p in net.parameters() if p.requires_grad], lr=lr)


class Observed:
    """What a plan measures of the EMA network during training, as `metrics` of `train`: KID and headroom."""

    def __init__(self, run: Run, config: Config, spec: Distance | None) -> None:
        from scalelong.evaluation.extractors import build_extractor
        from scalelong.evaluation.reference import dataset_reference

        self.run, self.spec = run, spec
        if spec is not None:
            self.extractor: Any = build_extractor(spec.extractor)
            split, n = spec.reference, spec.reference_n
            self.reference = dataset_reference(config.data.name, split, self.extractor, n, **config.data.options())

    def __call__(self, net: nn.Module, step: int) -> dict[str, float]:
        values = {}
        if self.spec is not None and self.spec.every and step % self.spec.every == 0:
            values["kid"] = self._evaluate(self.spec.n, net, step)["kid"]
        hooks = [hook for m in net.modules() for hook in m._forward_hooks.values() if isinstance(hook, Rounding)]
        if hooks and (largest := max(hook.largest for hook in hooks)) > 0:
            values["headroom"] = LARGEST_FP16 / largest
        return values

    def final(self) -> dict[str, float]:
        """The metrics of samples of the trained network."""
        return self._evaluate(self.spec.final, self.run.net, self.run.step) if self.spec and self.spec.final else {}

    def _evaluate(self, n: int, net: nn.Module, step: int) -> dict[str, float]:
        from scalelong.runs.generate import Request

        assert self.spec is not None
        request = Request(n=n, sampler=self.spec.sampler, steps=self.spec.evaluations, batch_size=100)
        result = self.run.evaluate(request, self.reference, self.extractor, net=net, step=step)
        return {name: float(metric.value) for name, metric in result.values.items() if metric.value is not None}


def make_record(run: Run, header: dict[str, Any], values: dict[str, float], failure: str | None) -> dict[str, Any]:
    """What a finished run leaves: settings, versions, thinned curves, and measures at full resolution."""
    from scalelong.experiments.comparison import measure_run

    measured, log = measure_run(run, header["arm"], run.config.seed), run.stability
    keys = ("campaign", "arm", "tuning", "command", "optimizer", "rounding", "distance")
    ended = {key: run.column(key).last for key in ("kid", "headroom") if len(run.column(key))}
    names = ("loss", "grad_norm", "val_loss", "val_loss_ema", "kid", "headroom")
    return {
        "format": FORMAT, **{key: header[key] for key in keys}, "seed": run.config.seed, "failure": failure,
        "steps": int(run.logged_step), "config": run.config.to_dict(), "parameters": run.record.get("parameters"),
        "versions": run.record.get("versions"), "written": run.record.get("written"),
        "values": measured.values | ended | values, "alarms": 0 if log is None else len(log.alarms()),
        "curves": {name: _thin(run.column(name)) for name in names if len(run.column(name))},
        "norms": measured.norms,
    }  # fmt: skip


def _thin(curve: Series) -> dict[str, Any]:
    """At most POINTS means over successive entries, each at its last step."""
    from scalelong.experiments.comparison import POINTS, rounded

    parts = np.array_split(np.arange(len(curve)), min(POINTS, len(curve)))
    with np.errstate(all="ignore"):
        means = [
            float(np.nanmean(curve.values[part])) if np.isfinite(curve.values[part]).any() else np.nan for part in parts
        ]
    return {"steps": [int(curve.steps[part[-1]]) for part in parts], "values": rounded(means)}


# ------------------------------------------------------------------------------------------------ rounding


def register_rounded() -> None:
    """Register the U-ViT whose residual stream is rounded after every block."""
    from scalelong.models.registry import MODELS

    if ROUNDED not in MODELS:
        uvit = MODELS["uvit"]
        MODELS[ROUNDED] = replace(
            uvit, build=partial(_rounded, uvit.build), settings=(*(uvit.settings or ()), "options")
        )


def _rounded(build: Callable[[Any, Any], nn.Module], model: Any, shapes: Any) -> nn.Module:
    net: Any = build(model, shapes)
    for block in (*net.in_blocks, net.mid_block, *net.out_blocks):
        block.register_forward_hook(Rounding(model.options["rounding"]))
    return net


class Rounding:
    """A forward hook that rounds a block's output, and its gradient, to what bf16 or fp16 can represent.

    The arithmetic stays fp32. "fp32" rounds nothing. `largest` is the largest absolute value so far.
    """

    def __init__(self, kind: str) -> None:
        if kind not in PRECISIONS:
            raise unknown("rounding", kind, PRECISIONS)
        self.kind, self.largest = kind, 0.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        import torch

        self.largest = max(self.largest, output.detach().abs().max().item())
        return output.to(getattr(torch, PRECISIONS[self.kind])).to(output.dtype)
