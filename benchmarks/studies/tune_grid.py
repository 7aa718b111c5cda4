"""`scalelong tune` against the full grid: regret, cost, and how often κ of `--scaling auto` is among the best.

    python benchmarks/studies/tune_grid.py train --out runs/tune-grid          # every candidate to the end: the grid
    python benchmarks/studies/tune_grid.py judge --out runs/tune-grid [--json FILE]

`train` trains every candidate of every case with three seeds to the end, through the rungs of `tune`, and resumes.
`judge` replays the search on these results (training is a function of config and step, so it is what the command
would have found) and compares its choice with the best of the grid, paired by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from scalelong.experiments.trials import TrialFile
from scalelong.experiments.tuning import Candidate, candidates_of, outcome
from scalelong.runs.config import override
from scalelong.runs.run import Run
from scalelong.training import preset, train

SEEDS = (0, 1, 2)
STEPS = 400
SMALL = {"data.name": "fashion-mnist", "data.validation": "test", "train.batch_size": 16, "validate.n": 256}
UNET = {"model.channels": [8, 16, 32], "train.lr": 0.002}
# name: preset, settings, what is searched
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "digits": ("digits", {}, ["scaling", "kappa"]),
    "fashion": ("fashion-tiny", SMALL | {"model.embed_dim": 48, "train.warmup": 50}, ["scaling", "kappa"]),
    "digits-lr": ("digits", {}, ["lr"]),
    "fashion-lr": ("fashion-tiny", SMALL | {"model.embed_dim": 48, "train.warmup": 50}, ["lr"]),
    "digits-uvit": ("digits-uvit", {}, ["kappa"]),
    "digits-uvit-deep": ("digits-uvit", {"model.depth": 24, "model.embed_dim": 32}, ["kappa"]),
    "digits-class": ("digits-class", {}, ["kappa"]),
    "fashion-unet": ("digits-class", SMALL | UNET | {"data.classes": False}, ["kappa"]),
}


def candidates(name: str) -> tuple[Candidate, ...]:
    start, settings, over = CASES[name]
    config = override(preset(start), {**settings, "train.steps": STEPS})
    return candidates_of(config, over)


def key(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True)


def train_grid(name: str, out: Path) -> None:
    known = TrialFile(out / name / "rungs.jsonl")
    for candidate in candidates(name):
        for seed in SEEDS:
            for rung in (math.ceil(STEPS / 8), math.ceil(STEPS / 4), math.ceil(STEPS / 2), STEPS):
                config = override(candidate.config, {"train.steps": rung, "seed": seed})
                if key(config) in known.finished:
                    continue
                folder, started = out / name / f"{candidate.name}-seed{seed}", time.process_time()
                train(config, folder, quiet=True)
                seconds = time.process_time() - started
                known.run(key(config), lambda folder=folder, s=seconds: outcome(Run(folder)) | {"cpu_seconds": s})
            print(name, candidate.name, seed, known.finished[key(config)], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("train", "judge"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.cases.split(","):
        train_grid(name, options.out)


if __name__ == "__main__":
    main()
