"""Objective × scaling on a small U-ViT: sample distance, norms and alarms over seeds (docs/objectives.md).

python benchmarks/studies/objectives.py runs/objectives results/objectives.json [--seeds 3] [--steps 200]

Trains one comparison per objective in OUT/OBJECTIVE with `scalelong compare`; the same command resumes. `--read` only
collects what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scalelong.diffusion import OBJECTIVES
from scalelong.experiments.statistics import mean_interval
from scalelong.runs.run import Run

SETTINGS = {
    "model.embed_dim": 32, "model.init_std": 0.08, "train.warmup": 20, "train.lr": 0.002, "ema.decay": 0.98,
    "train.precision": "fp32", "sample.sampler": "dpm-solver++", "sample.steps": 10, "sample.n": 16,
    "validate.every": 100, "validate.n": 64,
}  # fmt: skip
MEASURES = ("frechet", "kid", "norm_outer", "norm_inner", "growth_outer", "growth_inner", "feature_oscillation")


def command(objective: str, folder: Path, seeds: int, steps: int) -> list[str]:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    options = ["--objective", objective, "--scalings", "none,cs,ls,norm", "--seeds", str(seeds), "--steps", str(steps)]
    return ["scalelong", "compare", "digits-uvit", *options, "--samples", "256", *settings, "--out", str(folder)]


def collect(folder: Path, objective: str) -> list[dict[str, Any]]:
    """One row per scaling: mean and 95 % interval over seeds, and the number of alarms."""
    record = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["variant"] == variant]
        row: dict[str, Any] = {"objective": objective, "scaling": variant, "seeds": len(runs)}
        for key in MEASURES:
            estimate = mean_interval([run["values"][key] for run in runs])
            row[key] = {name: _rounded(getattr(estimate, name)) for name in ("mean", "low", "high")}
        logs = [Run(folder / run["folder"]).stability for run in runs]
        row["alarms"] = sum(len(log.alarms()) for log in logs if log is not None)
        row["finite"] = len(runs)  # a run whose loss is not finite stops and is missing here
        rows.append(row)
    return rows


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| objective | scaling | Fréchet distance | norm, outer | norm, inner | growth, inner | alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [_cell(row[key]) for key in ("frechet", "norm_outer", "norm_inner", "growth_inner")]
        lines.append(f"| `{row['objective']}` | `{row['scaling']}` | {' | '.join(cells)} | {row['alarms']} |")
    return "\n".join(lines)


def _cell(estimate: dict[str, float | None]) -> str:
    value, low, high = (estimate[name] for name in ("mean", "low", "high"))
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} ({low:.3g} … {high:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--read", action="store_true")
    options = parser.parse_args()
    rows = []
    for objective in OBJECTIVES:
        words = command(objective, options.folder / objective, options.seeds, options.steps)
        if not options.read:
            subprocess.run([sys.executable, "-m", *words, "--no-report", "--quiet"], check=True)
        rows += collect(options.folder / objective, objective)
    commands = [" ".join(command(name, Path("OUT") / name, options.seeds, options.steps)) for name in OBJECTIVES]
    record = {"command": "python benchmarks/studies/objectives.py OUT results/objectives.json", "commands": commands}
    options.out.write_text(json.dumps({**record, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
