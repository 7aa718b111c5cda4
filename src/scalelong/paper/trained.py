"""What has been trained of a study, read from its run folders: nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelong.experiments.acceleration import acceleration
from scalelong.experiments.comparison import judged_by
from scalelong.experiments.measures import RunMeasures, measure_run
from scalelong.experiments.plan import plan
from scalelong.experiments.scheduler import is_finished
from scalelong.experiments.statistics import Estimate, mean_interval, paired_ratio
from scalelong.paper.study import Study
from scalelong.runs.logs import EMPTY, Series
from scalelong.runs.watch_log import WatchLog, read_watch_log


@dataclass(frozen=True)
class Trained:
    """The finished runs of a study. Variants go by their names: none, uniform, cs-0.7, …"""

    study: Study
    steps: int
    seeds: tuple[int, ...]
    variants: tuple[str, ...]
    runs: tuple[RunMeasures, ...]
    missing: tuple[str, ...]  # runs that are not there or not finished, by name

    @property
    def title(self) -> str:
        return self.study.label or self.study.name

    @property
    def loss(self) -> str:
        """The validation loss that variants are judged by, as in `scalelong compare`."""
        return judged_by(self.runs)

    def of(self, variant: str) -> list[RunMeasures]:
        return [run for run in self.runs if run.variant == variant]

    def named(self, kind: str) -> str | None:
        """The variant of a kind: cs → cs-0.7. The plain one where there are several."""
        found = [name for name in self.variants if name == kind] or [
            name for name in self.variants if name.startswith(f"{kind}-") and name.removeprefix(f"{kind}-")[0].isdigit()
        ]
        return found[0] if found else None

    def values(self, variant: str, key: str) -> dict[int, float]:
        return {run.seed: run.values[key] for run in self.of(variant) if key in run.values}

    def curves(self, variant: str, key: str) -> dict[int, Series]:
        return {run.seed: run.curves.get(key, EMPTY) for run in self.of(variant)}

    def mean(self, variant: str, key: str) -> Estimate | None:
        values = list(self.values(variant, key).values())
        return mean_interval(values) if values else None

    def ratio(self, variant: str, baseline: str, key: str) -> Estimate | None:
        """variant/baseline, paired by seed."""
        return paired_ratio(self.values(variant, key), self.values(baseline, key))

    def sooner(self, variant: str, baseline: str, key: str) -> Estimate | None:
        """The acceleration factor. A run that never got to the baseline's final value counts with the greatest
        factor that it could still have, had it arrived right after its last step.
        """
        curves = self.curves(variant, key)
        found = acceleration(curves, self.curves(baseline, key))
        if found is None:
            return None
        last = {seed: float(curve.steps[-1]) for seed, curve in curves.items() if len(curve)}
        arrived = {seed: last[seed] if step is None else step for seed, step in found.steps.items()}
        return paired_ratio(found.baseline, arrived)

    def never(self, variant: str, baseline: str, key: str) -> list[int]:
        """The seeds in which the variant never was at the baseline's final value."""
        found = acceleration(self.curves(variant, key), self.curves(baseline, key))
        return [] if found is None else [seed for seed, step in found.steps.items() if step is None]

    def watch(self, variant: str, seed: int) -> WatchLog | None:
        """The monitor's log of one run."""
        folder = next((run.folder for run in self.of(variant) if run.seed == seed), None)
        return None if folder is None else read_watch_log(Path(folder) / "stability.jsonl")


def read_trained(study: Study, out: Path, seeds: Sequence[int] | None = None, steps: int | None = None) -> Trained:
    """The runs of a study in OUT that are finished. A folder with other settings is an error."""
    steps = study.steps if steps is None else steps
    seeds = study.seeds if seeds is None else tuple(seeds)
    jobs = plan(study.variants(steps), seeds, study.folder(out, steps), study.spec())
    done = [job for job in jobs if is_finished(job)]
    return Trained(
        study=study,
        steps=steps,
        seeds=seeds,
        variants=tuple(dict.fromkeys(job.variant for job in jobs)),
        runs=tuple(measure_run(job.folder, job.variant, job.seed) for job in done),
        missing=tuple(f"{study.name}/{job.name}" for job in jobs if job not in done),
    )
