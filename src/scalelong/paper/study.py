"""A study: variants of one network on one dataset under equal conditions, and its finished runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.experiments.campaign import PLAN, read_plan
from scalelong.experiments.campaign_results import Results, measures_of
from scalelong.experiments.comparison import Comparison, RunMeasures, measure_run, ranking_loss
from scalelong.experiments.plan import DistanceSpec, Variant, check_variants, plan
from scalelong.experiments.statistics import Estimate, acceleration, paired_ratio
from scalelong.experiments.worker import is_finished
from scalelong.runs.logs import EMPTY, Series
from scalelong.runs.run import Run
from scalelong.scaling import LearnableScaling, Scaling

if TYPE_CHECKING:
    from scalelong.runs.config import Config

LS = LearnableScaling(activation="relu")  # the paper's, not the default


def name_of(spec: Scaling) -> str:
    """Return the name of a variant: its label, but that of LS says what differs from the paper's."""
    return spec.label_against(LS)


def arguments(spec: Scaling) -> tuple[str, float | None, list[str]]:
    """Return the values of --scaling, --kappa and --set that select a spec on the command line."""
    changed = {f.name: value for f in fields(spec) if (value := getattr(spec, f.name)) != f.default}
    kappa = changed.pop(spec.kappa_option, None) if spec.kappa_option else None
    return spec.kind, kappa, [f"scaling.{name}={value}" for name, value in changed.items()]


@dataclass(frozen=True)
class Study:
    """What to train: a preset with settings and several scalings, the baseline first, for some steps and seeds.

    Several items share the runs of a study, which are in one folder named after it.
    """

    name: str
    preset: str
    scalings: tuple[Scaling, ...]
    steps: int
    label: str  # what distinguishes it from the other studies of an item
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    distance: DistanceSpec | None = None
    seconds: float = 0.0  # CPU seconds per run, if measured
    records: Path | None = None  # of a campaign with the same runs: its records stand for run folders

    def changed(self, seeds: tuple[int, ...] | None, steps: int | None) -> Study:
        """Return the study with other seeds or steps; another number of steps gets a name and a folder of its own.

        The plan behind `records` trains its own seeds only; with others the runs are trained in folders.
        """
        planned = seeds is None or set(seeds) <= set(self.seeds)
        study = replace(self, seeds=seeds or self.seeds, records=self.records if planned else None)
        if steps in (None, self.steps):
            return study
        seconds = self.seconds * steps / self.steps
        return replace(study, name=f"{self.name}-{steps}-steps", steps=steps, seconds=seconds, records=None)

    def fitted(self, gpus: int, gib: float) -> Study:
        """Return the study with the settings that its runs need on `gpus` GPUs of `gib` GiB each."""
        from scalelong.training.memory import fit

        needed = fit(self.config(self.scalings[0]), gpus, gib)
        words = (f"{key}={str(value).lower()}" for key, value in needed.items())
        return replace(self, settings=(*self.settings, *words))

    def config(self, spec: Scaling) -> Config:
        from scalelong.training.presets import choose

        kind, kappa, options = arguments(spec)
        return choose(self.preset, scaling=kind, kappa=kappa, steps=self.steps, settings=[*self.settings, *options])

    def variants(self) -> tuple[Variant, ...]:
        """Return one variant per scaling: none, uniform, cs-0.7, …"""
        return check_variants([Variant(name_of(spec), self.config(spec)) for spec in self.scalings])

    def commands(self, out: Path, gpus: int = 1) -> list[str]:
        """Return the same runs as `scalelong train` commands, each followed by its FID if the study measures it."""
        launch = f"accelerate launch --multi_gpu --num_processes {gpus} -m scalelong" if gpus > 1 else "scalelong"
        lines = []
        for seed in self.seeds:
            for spec in self.scalings:
                kind, kappa, options = arguments(spec)
                words = [*launch.split(), "train", self.preset, "--scaling", kind]
                words += ["--kappa", f"{kappa:g}"] if kappa is not None else []
                words += ["--steps", str(self.steps), "--seed", str(seed)]
                words += [word for setting in (*self.settings, *options) for word in ("--set", setting)]
                folder = str(out / self.name / f"{name_of(spec)}-seed{seed}")
                lines.append(shlex.join([*words, "--out", folder]))
                if self.distance is not None and self.distance.extractor is None:
                    lines.append(shlex.join([*launch.split(), "evaluate", folder, "--n", str(self.distance.n)]))
        return lines


@dataclass(frozen=True)
class Trained:
    """The finished runs of a study. Variants have the names of their run folders: none, uniform, cs-0.7, …"""

    study: Study
    runs: tuple[RunMeasures, ...]
    missing: tuple[str, ...]  # names of runs that are absent or unfinished

    @property
    def title(self) -> str:
        return self.study.label

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(name_of(spec) for spec in self.study.scalings)

    @property
    def loss(self) -> str:
        """The validation loss that variants are compared by, as in `scalelong compare`."""
        return ranking_loss(self.runs)

    def of(self, variant: str) -> list[RunMeasures]:
        return [run for run in self.runs if run.variant == variant]

    def named(self, kind: str) -> str | None:
        """Return the variant of a kind, cs → cs-0.7; the plain one if there are several."""
        if kind in self.variants:
            return kind
        return next((v for v in self.variants if v.startswith(f"{kind}-") and v[len(kind) + 1].isdigit()), None)

    def values(self, variant: str, key: str) -> dict[int, float]:
        """Return a measure by seed."""
        return {run.seed: run.values[key] for run in self.of(variant) if key in run.values}

    def ratio(self, variant: str, baseline: str, key: str) -> Estimate | None:
        """Return variant/baseline, paired by seed."""
        return paired_ratio(self.values(variant, key), self.values(baseline, key))

    def speedup(self, variant: str, baseline: str, key: str) -> tuple[Estimate | None, str]:
        """Return the acceleration factor, and a bound in words if a seed never reached the baseline's final value.

        Such a run counts with the largest factor it could still have, had it arrived right after its last step.
        """
        curves, others = self._curves(variant, key), self._curves(baseline, key)
        if (result := acceleration(curves, others)) is None:
            return None, ""
        last = {seed: float(curve.steps[-1]) for seed, curve in curves.items() if len(curve)}
        arrived = {seed: last[seed] if step is None else step for seed, step in result.steps.items()}
        return paired_ratio(result.baseline, arrived), result.bound

    def _curves(self, variant: str, key: str) -> dict[int, Series]:
        return {run.seed: run.curves.get(key, EMPTY) for run in self.of(variant)}

    def by_join(self, quantity: str) -> dict[str, list[Estimate | None]]:
        """Return variant → a quantity of ‖h_i‖ over the unscaled network's (of growth: minus), for every join."""
        names = sorted(self.variants, key=lambda name: name != "none")
        study = self.study
        comparison = Comparison(self.runs, names, preset=study.preset, steps=study.steps, seeds=study.seeds)
        return comparison.pointwise("backbone", quantity)

    def norms(self, variant: str) -> dict[int, dict[str, Any]]:
        """Return norms and oscillations of h_1 … h_N by seed, of the runs that have a stability log: see `norms_of`."""
        return {run.seed: run.norms["backbone"] for run in self.of(variant) if "backbone" in run.norms}


def read_trained(study: Study, out: Path) -> Trained:
    """Read the finished runs of a study in `out`, or the records of its campaign. Other settings raise."""
    if study.records is not None and (study.records / PLAN).exists():
        results = Results(read_plan(study.records))
        names = [f"{variant.name}-seed{seed}" for seed in study.seeds for variant in study.variants()]
        found = tuple(measures_of(results.records[name]) for name in names if name in results.finished)
        return Trained(study, found, tuple(f"{study.name}/{n}" for n in names if n not in results.finished))
    jobs = plan(study.variants(), study.seeds, out / study.name, study.distance)
    finished = [job for job in jobs if is_finished(job)]
    runs = tuple(measure_run(Run(job.folder), job.variant, job.seed) for job in finished)
    return Trained(study, runs, tuple(f"{study.name}/{job.name}" for job in jobs if job not in finished))
