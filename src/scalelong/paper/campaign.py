"""Training the runs that items read: `python -m scalelong.paper.campaign` trains all of them, one at a time."""

from __future__ import annotations

import sys

from scalelong.paper.regime import CAMPAIGN, DEEP, DIGITS, SMALL_BATCH
from scalelong.paper.run import Options, StoppedError, train_study

STUDIES = (CAMPAIGN, DIGITS, SMALL_BATCH, DEEP)


def main() -> None:
    """Every study of the CPU size, in the order of its use, seed by seed."""
    for study in STUDIES:
        print(f"{study.name}: {len(study.arms)} variants × {len(study.seeds)} seeds, {study.steps} steps", flush=True)
        try:
            failures = train_study(study, Options(jobs=1))
        except StoppedError as stopped:
            sys.exit(128 + stopped.signal)
        for line in failures:
            print(line, flush=True)


if __name__ == "__main__":
    main()
