"""`scalelong tune`: scaling, κ and learning rate of a preset by successive halving over run folders, resumable."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scalelong.errors import RunError, ScaleLongError, invalid, unknown
from scalelong.experiments.halving import Score, Tuned, halve
from scalelong.experiments.live import Live
from scalelong.experiments.plan import Job, trained_steps
from scalelong.experiments.scheduler import Ending, make_slots, run_jobs, usable_cores, visible_gpus
from scalelong.experiments.statistics import CONFIDENCE
from scalelong.experiments.trials import TrialFile
from scalelong.runs.config import Config, override
from scalelong.runs.run import Run
from scalelong.scaling import ConstantScaling, NoScaling, Scaling, parse_scaling, split_scalings

OVER = ("scaling", "kappa", "lr")
SCALINGS = "none,uniform,cs,ls"
LR_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
KAPPAS = 4  # values in the range that the data gives
EXPLODED = 10.0  # times the median candidate's norms


@dataclass(frozen=True)
class Candidate:
    """One setting, the name of its run folder, and its config."""

    name: str
    config: Config


@dataclass(frozen=True)
class Tuning:
    """The result of `tune_preset`; `best` has the config to train with."""

    result: Tuned
    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]

    @property
    def best(self) -> Candidate:
        return next(c for c in self.candidates if c.name == self.result.best)

    def lr(self, name: str) -> float:
        return next(c.config.train.lr for c in self.candidates if c.name == name)


def candidates_of(config: Config, over: Sequence[str], scalings: str | None = None) -> tuple[Candidate, ...]:
    """Every combination of what is searched; without scaling always among them.

    `kappa` takes values from the range that the data gives, for CS; `lr` factors of the config's; `scaling` a list.
    """
    if not over:
        raise invalid("--over", f"one or more of {', '.join(OVER)}", "")
    for word in over:
        if word not in OVER:
            raise unknown("--over", word, OVER)
    specs: list[Scaling] = [NoScaling()] if "scaling" in over or "kappa" in over else [config.scaling]
    if "scaling" in over:
        words = split_scalings(scalings or SCALINGS)
        specs += [parse_scaling(w, kappa=config.kappa if w in ("cs", "cs-reverse") else None) for w in words]
        specs = [_resolved(config, spec) for spec in specs]
    if "kappa" in over:
        specs += [ConstantScaling(kappa) for kappa in _kappas(config)]
    rates = [config.train.lr * factor for factor in LR_FACTORS] if "lr" in over else [config.train.lr]
    found = {}
    for spec, lr in product(dict.fromkeys(specs), rates):
        name = spec.label + (f"-lr{lr:g}" if len(rates) > 1 else "")
        # A constant learning rate: a run that resumes must not have decayed before.
        settings = {"scaling": spec, "train.lr": lr, "train.schedule": "constant", "sample.n": 0, "validate.every": 0}
        found[name] = Candidate(name, override(config, settings))
    return tuple(found.values())


def _resolved(config: Config, spec: Scaling) -> Scaling:
    from scalelong.training.auto import resolve_kappa

    return resolve_kappa(replace(config, scaling=spec))[0].scaling if spec.unresolved else spec


def _kappas(config: Config) -> list[float]:
    import torch

    from scalelong.runs.run import build_network
    from scalelong.skips import find_sites
    from scalelong.training.auto import data_range
    from scalelong.training.examples import Examples

    examples = Examples(config, config.data.split)
    shapes = examples.shapes
    with torch.device("meta"):
        skips = len(find_sites(build_network(override(config, {"scaling": NoScaling()}), shapes)))
    found = data_range(config, examples, skips)
    step = (found.high - found.low) / (KAPPAS - 1)
    values = dict.fromkeys(round(found.low + k * step, 2) for k in range(KAPPAS))
    return [value for value in values if 0 < value < 1]  # 1 is no scaling


@dataclass(frozen=True)
class Budget:
    """Steps of all runs together, and seconds of wall time if it was given as a time."""

    steps: int
    seconds: float | None = None


def parse_budget(text: str, seconds_per_step: Callable[[], float], jobs: int) -> Budget:
    """`2000steps` or `30m`, `1h`, `90s` of wall time for all candidates together, with `jobs` of them in parallel."""
    for suffix, scale in (("steps", None), ("s", 1), ("m", 60), ("h", 3600)):
        number = text.strip().lower().removesuffix(suffix)
        if number != text.strip().lower():
            try:
                value = float(number)
            except ValueError:
                break
            if value > 0 and math.isfinite(value):
                seconds = value * (scale or 0)
                return (
                    Budget(int(value)) if scale is None else Budget(int(seconds * jobs / seconds_per_step()), seconds)
                )
    raise invalid("--budget", "a number of steps or a time such as 2000steps, 90s, 30m or 1h", text)


class _Clock:
    """Whether a rung would end in time, judged by the steps of this process so far; before its first step, it would."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.started, self.steps = seconds, time.monotonic(), 0

    def count(self, steps: int) -> None:
        """Count steps that are about to be trained. Time runs from the first of them."""
        if not self.steps:
            self.started = time.monotonic()
        self.steps += steps

    def allows(self, cost: int) -> bool:
        if self.seconds is None or not self.steps:
            return True
        return (time.monotonic() - self.started) * (1 + cost / self.steps) <= self.seconds


def tune_preset(
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    out: Path,
    *,
    budget: Budget | None = None,
    confidence: float = CONFIDENCE,
    jobs: int | None = None,
    quiet: bool = False,
) -> Tuning:
    """Search among candidates in OUT/NAME-seedN. A second call resumes: what was trained is not trained again."""
    from scalelong.training.examples import Examples

    configs = {c.name: c.config for c in candidates}
    Examples(candidates[0].config, candidates[0].config.data.validation)  # its loss decides; raises without one
    known, clock = TrialFile(out / "rungs.jsonl"), _Clock(budget.seconds if budget else None)

    def advance(names: Sequence[str], steps: int) -> dict[str, Score]:
        planned = [
            Job(name, seed, override(configs[name], {"train.steps": steps, "seed": seed}), out / f"{name}-seed{seed}")
            for seed in seeds
            for name in names
        ]
        missing = [job for job in planned if _key(job) not in known.finished]
        for job in missing:  # the loss of a later step does not compare with those of this rung
            if (trained := trained_steps(Run(job.folder))) > steps:
                raise RunError(
                    f"{job.folder} was trained for {trained} steps by another search, this one compares at {steps}; "
                    "use another --out"
                )
        clock.count(sum(steps - trained_steps(Run(job.folder)) for job in missing))
        if missing and not quiet:
            print(f"to step {steps}: {', '.join(names)}", file=sys.stderr, flush=True)
        for ending in _train(missing, out, jobs, quiet):
            known.run(_key(ending.job), partial(_result, ending))
        found = {name: [known.finished[_key(job)] for job in planned if job.variant == name] for name in names}
        return scores(found)

    steps = candidates[0].config.train.steps
    result = halve(
        list(configs), advance, steps=steps, blocks=len(seeds), budget=budget.steps if budget else None,
        confidence=confidence, may_start=clock.allows,
    )  # fmt: skip
    return Tuning(result, tuple(candidates), tuple(seeds))


class InterruptedSearchError(ScaleLongError):
    """A signal stopped the search; the same command resumes it."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}; the same command resumes")
        self.signal = signal


def _train(missing: Sequence[Job], out: Path, jobs: int | None, quiet: bool) -> Sequence[Ending]:
    if not missing:
        return ()
    slots = make_slots(len(missing), jobs, visible_gpus(), usable_cores())
    with Live(missing, quiet=quiet) as display:
        endings, signal = run_jobs(missing, slots, out / "logs", display)
    if signal is not None:
        raise InterruptedSearchError(signal)
    return endings


def _key(job: Job) -> str:
    return json.dumps([job.name, job.config.to_dict()], sort_keys=True)


def _result(ending: Ending) -> dict[str, Any]:
    """What a training showed. To become non-finite is a result; any other failure raises."""
    log = " ".join(ending.lines)
    if not ending.ran and "not finite" not in log:
        raise RunError(f"{ending.job.name} {ending.reason()}: {log[-300:]}")
    return outcome(Run(ending.job.folder)) | ({} if ending.ran else {"loss": None})


def outcome(run: Run) -> dict[str, Any]:
    """Return the validation loss of the EMA weights, the kinds of alarms, and the largest norm where a skip joins."""
    stability = run.stability
    norms = None if stability is None else stability.norms("train", "backbone")
    kinds = [] if stability is None else sorted({str(alarm.get("kind")) for alarm in stability.log.alarms()})
    norm = None if norms is None else max((float(v) for v in norms.final if math.isfinite(v)), default=None)
    return {"loss": run.column("val_loss_ema").final, "alarms": kinds, "norm": norm}


def scores(results: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Score]:
    """Return the scores of candidates at one rung from the outcomes of their seeds.

    Norms of every network grow in training, so they explode if they are EXPLODED times the median candidate's. Alarms
    drop a candidate while another one trains without: if all raise them, they say nothing about the choice.
    """
    largest = {name: max((row["norm"] or 0.0 for row in rows), default=0.0) for name, rows in results.items()}
    usual, found = statistics.median(largest.values()), {}
    for name, rows in results.items():
        losses = tuple(row["loss"] for row in rows)
        alarms = sorted({kind for row in rows for kind in row["alarms"]})
        failed = f"raised alarms ({', '.join(alarms)})" if alarms else None
        if any(loss is None or not math.isfinite(loss) for loss in losses):
            losses, failed = (), "became non-finite"
        elif largest[name] > EXPLODED * usual > 0:
            failed = f"had norms {largest[name] / usual:.3g} times the median candidate's"
        found[name] = Score(losses, failed)
    calm = any(score.failed is None for score in found.values())
    return found if calm else {name: replace(s, failed=None) if s.losses else s for name, s in found.items()}
