"""Oscillation of the middle block unscaled and with CS 0.8, as the monitor shows it: 12 long skips on the digits.

    python benchmarks/studies/monitor_first_look.py [--steps 800] [--seeds 2] [--json results/monitor-first-look.json]

Each run trains the digits preset with depth 24 (12 long skips, width 64), batch 16 and lr 1e-3, watched at every step:
once as the preset is, once with the official code's initialisation and optimizer. Figures are over windows of 50
steps that do not overlap, after the first 200 steps: their median and quartiles, for the fixed probe batch and for the
training batches. Same seed, same initial weights, same batches for both scalings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from scalelong.files import json_line_blocks
from scalelong.monitor.log import read_stability
from scalelong.training.loop import train
from scalelong.training.presets import choose

WINDOW, FIRST = 50, 200
POINTS = {"middle": ("backbone", -1), "outermost join": ("backbone", 0), "output": ("blocks", -1)}
COMMON = [
    "model.depth=24", "train.batch_size=16", "train.lr=1e-3", "train.log_every=1", "monitor.every=1",
    "monitor.samples=8", "checkpoint.every=200", "sample.n=0", "sample.every=0", "validate.every=0",
]  # fmt: skip
VARIANTS = {
    "preset": [],
    "official": [
        "model.init_std=0.02", "model.mlp_time_embed=false", "train.clip=none", "train.betas=0.99,0.999",
        "train.weight_decay=0.03",
    ],
}  # fmt: skip
SCALINGS = (("none", None), ("cs", 0.8))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [entry for rows in json_line_blocks(path) for entry in rows]


def run(variant: str, scaling: str, kappa: float | None, seed: int, steps: int, runs: Path) -> dict[str, Any]:
    settings = [*COMMON, *VARIANTS[variant]]
    config = choose("digits-uvit", scaling=scaling, kappa=kappa, seed=seed, steps=steps, settings=settings)
    label = config.scaling.label
    folder = runs / f"{variant}-{label}-seed{seed}"
    if not train(config, folder, quiet=True).finished:
        raise SystemExit(f"{folder} was interrupted; the same command goes on")
    log = read_stability(folder / "stability.jsonl")
    metrics = _read_lines(folder / "metrics.jsonl")
    looks: list[dict[str, Any]] = []
    for look in log.entries:  # windows that do not overlap
        if look["step"] >= (looks[-1]["step"] if looks else FIRST) + WINDOW:
            looks.append(look)
    figures = {
        f"{where} {what}": _spread([look["oscillation"][where][key][place] for look in looks])
        for where in ("probe", "train")
        for what, (key, place) in POINTS.items()
    }
    figures["gradient"] = _spread([look["oscillation"]["grad"]["total"] for look in looks])
    return {
        "variant": variant, "scaling": label, "seed": seed, "skips": len(log.header["skips"]), "windows": len(looks),
        "oscillation": figures, "loss of the last 200 steps": _mean([m["loss"] for m in metrics][-200:]),
        "val_loss": metrics[-1].get("val_loss"), "alarms": [alarm["text"] for alarm in log.alarms()],
    }  # fmt: skip


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = (round(q, 4) for q in statistics.quantiles(values, n=4))
    return {"median": middle, "quartiles": [low, high], "least": min(values), "most": max(values)}


def _mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/monitor-first-look"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for variant in VARIANTS:
        for seed in range(options.seeds):
            for scaling, kappa in SCALINGS:
                result = run(variant, scaling, kappa, seed, options.steps, options.runs)
                results.append(result)
                middle = [result["oscillation"][f"{where} middle"] for where in ("probe", "train")]
                told = [f"{m['median']} ({m['least']} … {m['most']})" for m in middle]
                print(f"{variant} {result['scaling']} seed {seed}: probe {told[0]}, train {told[1]}", flush=True)
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "settings": {variant: ["digits-uvit", *COMMON, *extra] for variant, extra in VARIANTS.items()},
            "window": WINDOW,
            "after step": FIRST,
            "torch": torch.__version__,
            "runs": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
