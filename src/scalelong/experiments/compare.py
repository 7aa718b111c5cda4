"""Train variants under equal conditions and compare them: `scalelong compare`, callable from Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.errors import MissingSplitError, SourceUnavailableError
from scalelong.experiments.comparison import Comparison, measure_run
from scalelong.experiments.live import Live
from scalelong.experiments.plan import DistanceSpec, Variant, plan
from scalelong.experiments.scheduler import Ending, make_slots, run_jobs, usable_cores, visible_gpus
from scalelong.experiments.statistics import statistics_note
from scalelong.experiments.worker import is_finished
from scalelong.runs.run import COMPARISON, Run

if TYPE_CHECKING:
    from rich.console import Console

    from scalelong.runs.config import Config


@dataclass(frozen=True)
class Result:
    """The comparison, how every job ended, and the signal that stopped them, if any."""

    comparison: Comparison
    endings: tuple[Ending, ...]
    signal: int | None
    out: Path

    @property
    def started(self) -> bool:
        """Whether any run logged something, so that there is something to report."""
        return any(ending.job.folder.joinpath("metrics.jsonl").is_file() for ending in self.endings)

    @property
    def failures(self) -> tuple[Ending, ...]:
        """Runs that ended early, except those stopped by the signal that stopped the comparison."""
        return tuple(e for e in self.endings if not e.ran and not (e.stopped and self.signal is not None))


def run_comparison(
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path | str,
    *,
    distance: DistanceSpec | None = None,
    jobs: int | None = None,
    gpus: int = 1,
    quiet: bool = False,
) -> Result:
    """Train every variant with every seed in OUT/VARIANT-seedN and write OUT/comparison.json.

    Runs of one seed share data order, noise and initial weights. Finished runs are not trained again, stopped runs
    resume.

    Args:
        variants: What to compare; the first is the baseline.
        seeds: Each seed trains every variant once.
        out: Folder of the runs, of their logs and of comparison.json.
        distance: The Fréchet distance to measure of every run; None measures none.
        jobs: Runs side by side; by default as many as there are GPUs for, otherwise one per core.
        gpus: GPUs of one run.
        quiet: Show no progress.
    """
    out = Path(out)
    planned = plan(variants, seeds, out, distance)
    prepare_data([job.config for job in planned if not is_finished(job)])
    slots = make_slots(len(planned), jobs, visible_gpus(), usable_cores(), gpus)
    with Live(planned, quiet=quiet) as display:
        endings, signal = run_jobs(planned, slots, out / "logs", display)
    comparison = Comparison(
        [measure_run(Run(e.job.folder), e.job.variant, e.job.seed) for e in endings if e.ran],
        [variant.name for variant in variants],
        preset=variants[0].config.preset,
        objective=variants[0].config.diffusion.objective,
        steps=variants[0].config.train.steps,
        seeds=seeds,
        missing=[f"{e.job.name} {e.reason()}" for e in endings if not e.ran],
        unfinished=[e.job.folder.name for e in endings if not e.ran],
        failed=[(e.job.variant, e.job.seed) for e in endings if not e.ran and Run(e.job.folder).became_nonfinite],
    )
    comparison.save(out / COMPARISON)
    return Result(comparison, endings, signal, out)


def prepare_data(configs: Iterable[Config]) -> None:
    """Prepare images, latents and captions once, before the runs that share them; wrong data fails here."""
    from scalelong.training.examples import Examples

    for config in {config.data: config for config in configs}.values():
        Examples(config, config.data.split)
        with suppress(MissingSplitError, SourceUnavailableError):
            Examples(config, config.data.validation)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table with one row per measure and one column per variant, how to read it, and what is missing."""
    from rich.markup import escape
    from rich.table import Table

    count = len(comparison.seeds)
    objective = "" if comparison.objective == "eps" else f", objective {comparison.objective}"
    title = f"{comparison.preset}{objective}: {comparison.steps} steps, {count} seed{'' if count == 1 else 's'}"
    table = Table("", title=title, title_justify="left", show_lines=True)
    for row in comparison.rows:
        table.add_column(row.variant + (" (baseline)" if row.variant == comparison.baseline else ""), justify="right")
    for name, note, cells in comparison.table():
        heading = f"{name} {note}" if name == "sooner" else name
        table.add_row(heading, *(escape("\n".join(filter(None, cell))) for cell in cells))
    if comparison.runs:
        console.print(table)
        for line in (*comparison.meanings, statistics_note(count), *comparison.notes):
            console.print(f"• {line}", highlight=False, markup=False)
    for line in comparison.missing:
        console.print(f"missing: {line}", style="red", highlight=False, markup=False)
