"""Skip-Tuning of a trained run: distance to real images against the number of network evaluations, for several ρ.

    scalelong train digits-class --steps 600 --seed 0 --out runs/digits
    python benchmarks/studies/skip_tuning.py runs/digits --json results/skip-tuning-digits.json

One network serves all cells: `set_coefficients` changes ρ between them. All cells share seeds and classes. `kid` is the
kernel distance and `frechet` the Fréchet distance, both of pixels averaged to 8×8, with 95 % intervals. The sensitivity
is what `scalelong.describe` measures: the relative change of the consumer's output per relative change of ρ_i.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import scalelong
from scalelong import SkipTuning, evaluate_images, load_run
from scalelong.runs.generate import Request, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rho", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 1.0, 1.1])
    parser.add_argument("--evaluations", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = load_run(options.run)
    net, config, rows = run.net.eval(), run.config, []
    shape = (8, run.facts.shapes.channels, run.facts.shapes.size, run.facts.shapes.size)
    torch.manual_seed(0)
    example = {"sample": torch.randn(shape), "timestep": torch.full((8,), 300.0)}
    if run.facts.shapes.label_rows:
        example["class_labels"] = torch.arange(8) % run.facts.shapes.label_rows
    felt = {}
    for placement in ("join", "after_norm"):
        scalelong.apply(net, SkipTuning(1.0), placement=placement, replace=True)
        felt[placement] = [round(row.felt, 4) for row in scalelong.describe(net, **example).rows]
        for steps in options.evaluations:
            for rho in options.rho:
                scalelong.set_coefficients(net, SkipTuning(rho))
                s = config.sample
                request = Request(
                    n=options.n, sampler=s.sampler, steps=steps, guidance=s.guidance, seed=options.seed, batch_size=250
                )
                images = np.concatenate(list(generate(net, config, run.facts, request)))
                values = evaluate_images(images, f"{config.data.name}:{config.data.split}", "pixels").values
                row = {"placement": placement, "evaluations": steps, "rho": rho}
                for name, value in values.items():
                    row[name] = [value.value, *((value.interval.low, value.interval.high) if value.interval else ())]
                rows.append(row)
                print(json.dumps(row), flush=True)
    record = {
        "command": f"python benchmarks/studies/skip_tuning.py {options.run.name} --n {options.n}",
        "run": f"{config.preset}, {run.step} steps, seed {config.seed}, {config.scaling.label}",
        "sampler": config.sample.sampler, "guidance": config.sample.guidance, "sensitivity": felt, "rows": rows,
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
