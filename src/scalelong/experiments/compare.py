"""Train variants under equal conditions and compare them: what `scalelong compare` does, callable from Python."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from scalelong.experiments.comparison import FILE, Comparison, summarise
from scalelong.experiments.distance import DistanceSpec
from scalelong.experiments.live import Live
from scalelong.experiments.measures import measure_run
from scalelong.experiments.plan import Variant, plan
from scalelong.experiments.scheduler import Ending, Watcher, run_jobs
from scalelong.experiments.slots import make_slots


@dataclass(frozen=True)
class Result:
    """The comparison, how every job ended, and the signal that stopped them, if one did."""

    comparison: Comparison
    endings: tuple[Ending, ...]
    signal: int | None
    out: Path

    @property
    def failures(self) -> tuple[Ending, ...]:
        """Runs that ended early, other than by the signal that stopped the comparison."""
        return tuple(e for e in self.endings if not e.ran and not (e.stopped and self.signal is not None))


def run_comparison(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path | str,
    *,
    distance: DistanceSpec | None = None,
    jobs: int | None = None,
    quiet: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Train every variant with every seed in OUT/VARIANT-seedN and write OUT/comparison.json.

    Runs of one seed share data order, noise and initial weights. What has been trained is not trained again, what was
    stopped goes on. The first variant is the baseline.
    """
    out = Path(out)
    planned = plan(variants, seeds, out, distance)
    slots = make_slots(len(planned), jobs)
    with Live(planned, quiet=quiet) if watcher is None else nullcontext(watcher) as shown:
        endings, signal = run_jobs(planned, slots, out / "logs", shown)
    finished = [ending.job for ending in endings if ending.ran]
    comparison = summarise(
        [measure_run(job.folder, job.variant, job.seed) for job in finished],
        [variant.name for variant in variants],
        preset=variants[0].config.preset,
        steps=variants[0].config.train.steps,
        seeds=seeds,
        missing=[f"{ending.job.name} {ending.reason()}" for ending in endings if not ending.ran],
    )
    comparison.save(out / FILE)
    return Result(comparison, endings, signal, out)
