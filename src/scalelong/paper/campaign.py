"""Training the runs that items read: `python -m scalelong.paper.campaign` trains all of them, in order of use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.paper.regime import CAMPAIGN, DEEP, DIGITS, SMALL_BATCH
from scalelong.paper.study import Study

if TYPE_CHECKING:
    from scalelong.experiments.compare import Result

STUDIES = (CAMPAIGN, DIGITS, SMALL_BATCH, DEEP)
OUT = Path("runs") / "paper"


def train_study(
    study: Study,
    out: Path,
    seeds: Sequence[int] | None = None,
    *,
    steps: int | None = None,
    jobs: int | None = None,
    quiet: bool = False,
) -> Result:
    """Train what of a study is not trained yet; a stopped run goes on."""
    from scalelong.experiments.compare import run_comparison

    return run_comparison(
        study.variants(steps),
        study.seeds if seeds is None else seeds,
        study.folder(out, steps),
        distance=study.spec(),
        jobs=jobs,
        quiet=quiet,
    )


def main() -> None:
    """Every study, one run at a time, seed by seed."""
    for study in STUDIES:
        print(f"{study.name}: {len(study.arms)} variants × {len(study.seeds)} seeds, {study.steps} steps", flush=True)
        result = train_study(study, OUT, jobs=1)
        if result.signal is not None:
            sys.exit(128 + result.signal)
        for ending in result.failures:
            print(f"{ending.job.name} {ending.reason()}", flush=True)


if __name__ == "__main__":
    main()
