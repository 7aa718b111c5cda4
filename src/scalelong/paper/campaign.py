"""Training all runs of the CPU size with one core: `python -m scalelong.paper.campaign`. Again: it goes on."""

from __future__ import annotations

import sys

from scalelong.errors import ScaleLongError
from scalelong.paper.regime import CAMPAIGN, DEEP, DIGITS, SMALL_BATCH
from scalelong.paper.run import RUNS, Options, StoppedError, train_study
from scalelong.paper.study import Study

SHORT = (DIGITS, SMALL_BATCH, DEEP)


def main() -> None:
    """The long runs, then the short ones, seed by seed."""
    try:
        failures = train_study(CAMPAIGN, Options(jobs=1))
    except StoppedError as stopped:
        sys.exit(128 + stopped.signal)
    for line in failures:
        print(line, flush=True)
    for study in SHORT:
        train_here(study)


def train_here(study: Study) -> None:
    """The runs of a study in this process: starting one takes as long as half of a short run."""
    from scalelong.experiments.plan import plan
    from scalelong.experiments.scheduler import is_finished
    from scalelong.training.loop import train

    for job in plan(study.variants(), study.seeds, study.folder(RUNS)):
        if not is_finished(job):
            try:
                result = train(job.config, job.folder, quiet=True)
            except ScaleLongError as error:  # a loss that is not finite, say: the others go on
                print(f"{study.name}/{job.name}: {error}", flush=True)
                continue
            if not result.finished:
                sys.exit(128 + (result.signal or 0))
            print(f"{study.name}/{job.name}: done", flush=True)


if __name__ == "__main__":
    main()
