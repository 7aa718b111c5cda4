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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalelong.experiments.halving import Tuned, halve, paired_differences
from scalelong.experiments.statistics import mean_interval
from scalelong.experiments.trials import TrialFile
from scalelong.experiments.tuning import Candidate, candidates_of, outcome, scores
from scalelong.runs.config import Config, override
from scalelong.runs.run import Run
from scalelong.training import preset, train
from scalelong.training.auto import resolve_kappa

SEEDS = (0, 1, 2)
FASHION = {
    "data.name": "fashion-mnist", "data.validation": "test", "train.batch_size": 16, "validate.n": 256,
    "model.embed_dim": 48, "train.warmup": 20,
}  # fmt: skip
# name: preset, settings, steps, what is searched
CASES: dict[str, tuple[str, dict[str, Any], int, list[str]]] = {
    "digits": ("digits", {}, 400, ["scaling", "kappa"]),
    "digits-lr": ("digits", {"train.warmup": 20}, 160, ["lr"]),
    "digits-uvit": ("digits-uvit", {}, 400, ["kappa"]),
    "digits-uvit-deep": ("digits-uvit", {"model.depth": 24, "model.embed_dim": 32}, 400, ["kappa"]),
    "fashion": ("fashion-tiny", FASHION, 200, ["kappa"]),
    "fashion-lr": ("fashion-tiny", FASHION, 200, ["lr"]),
}


def candidates(name: str) -> tuple[Candidate, ...]:
    start, settings, steps, over = CASES[name]
    return candidates_of(override(preset(start), {**settings, "train.steps": steps}), over)


def key(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True)


def train_grid(name: str, out: Path) -> None:
    known, steps = TrialFile(out / name / "rungs.jsonl"), CASES[name][2]
    for candidate in candidates(name):
        for seed in SEEDS:
            for rung in (math.ceil(steps / 8), math.ceil(steps / 4), math.ceil(steps / 2), steps):
                config = override(candidate.config, {"train.steps": rung, "seed": seed})
                if key(config) in known.finished:
                    continue
                folder, started = out / name / f"{candidate.name}-seed{seed}", time.process_time()
                train(config, folder, quiet=True)
                seconds = time.process_time() - started
                known.run(key(config), lambda folder=folder, s=seconds: outcome(Run(folder)) | {"cpu_seconds": s})
            print(name, candidate.name, seed, known.finished[key(config)], flush=True)


def judge(name: str, out: Path) -> dict[str, Any] | None:
    """Replay `tune` on the results of the grid; None if the grid is not complete."""
    stored, listed, total = TrialFile(out / name / "rungs.jsonl").finished, candidates(name), CASES[name][2]
    known = {key(Config.from_dict(json.loads(k))): v for k, v in stored.items()}  # newer settings have their defaults

    def results(candidate: Candidate, steps: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
        return [known[key(override(candidate.config, {"train.steps": steps, "seed": seed}))] for seed in seeds]

    def search(seeds: Sequence[int], budget: int | None) -> Tuned:
        def advance(names: Sequence[str], steps: int) -> dict[str, Any]:
            return scores({c.name: results(c, steps, seeds) for c in listed if c.name in names})

        return halve([c.name for c in listed], advance, steps=total, blocks=len(seeds), budget=budget)

    try:
        final = {c.name: tuple(row["loss"] for row in results(c, total, SEEDS)) for c in listed}
    except KeyError:
        return None
    means = {candidate: math.fsum(losses) / len(losses) for candidate, losses in final.items()}
    best = min(means, key=means.__getitem__)
    gaps = paired_differences(final, best, 0.95)
    third = len(listed) * total * len(SEEDS) // 3
    found, whole = search(SEEDS, third), search(SEEDS, None)
    unseen = []  # the search on two seeds against the grid's best on the same two, judged by the third
    for k, seed in enumerate(SEEDS):
        others = [s for s in SEEDS if s != seed]
        choice = search(others, len(listed) * total * 2 // 3).best
        grid = min(final, key=lambda c: math.fsum(v for j, v in enumerate(final[c]) if j != k))
        unseen.append(final[choice][k] - final[grid][k])
    spread = max(means.values()) - min(means.values())
    record: dict[str, Any] = {
        "case": name, "preset": CASES[name][0], "settings": CASES[name][1], "steps": total, "final": final,
        "best_of_grid": best, "tune": found.best, "tied": list(found.tied), "regret": asdict(gaps[found.best]),
        "spread_of_grid": spread, "cost": found.steps / found.grid_steps,
        "cost_without_budget": whole.steps / whole.grid_steps, "tune_without_budget": whole.best,
        "regret_on_unseen_seeds": asdict(mean_interval(unseen)),
        "gaps_to_best": {candidate: asdict(gap) for candidate, gap in gaps.items()},
        "alarms": sorted({kind for c in listed for row in results(c, total, SEEDS) for kind in row["alarms"]}),
    }  # fmt: skip
    if "kappa" in CASES[name][3]:
        chosen = resolve_kappa(listed[0].config)[1]
        trained = {c.name: c.config.scaling.kappa for c in listed if c.config.scaling.kind == "cs"}
        nearest = min(trained, key=lambda c: abs(trained[c] - chosen.kappa))
        best_kappa = min(trained, key=means.__getitem__)
        gap = paired_differences(final, best_kappa, 0.95)[nearest]
        record["auto"] = {
            "kappa": chosen.kappa, "low": chosen.low, "high": chosen.high, "recommended": chosen.recommended,
            "nearest": nearest, "best_kappa": best_kappa, "gap_to_best_kappa": asdict(gap),
            "within_noise": gap.low is None or gap.low <= 0, "gap_to_best_of_grid": asdict(gaps[nearest]),
        }  # fmt: skip
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("train", "judge"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.cases.split(","):
        if options.stage == "train":
            train_grid(name, options.out)
        elif (row := judge(name, options.out)) is not None:
            rows.append(row)
            print(json.dumps(row))
    if options.json and rows:
        done = ",".join(row["case"] for row in rows)
        commands = [
            f"python benchmarks/studies/tune_grid.py {stage} --out runs/grid --cases {done}"
            for stage in ("train", "judge")
        ]
        options.json.write_text(json.dumps({"commands": commands, "seeds": SEEDS, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
