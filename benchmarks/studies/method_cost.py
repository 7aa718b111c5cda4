"""CPU time of a training step and of a sampling step with every method, relative to the unscaled network.

    OMP_NUM_THREADS=1 python benchmarks/studies/method_cost.py --json results/method-cost.json

The cases take turns, so that a busy machine slows all of them equally; the ratio of each round is to the unscaled
network's step of the same round, and the median over rounds is reported with its quartiles. CPU time, not wall time.
"""

import argparse
import copy
import json
import statistics
import time
import warnings
from pathlib import Path

import torch

import scalelong
from scalelong import build_unet, parse_scaling
from scalelong.models.unet import unet_settings

CASES = ["none", "uniform", "cs:0.7", "ls", "norm", "norm:rms", "norm-both", "mp", "gate", "sparse", "adapter"]
CASES += ["skip-tuning:0.8", "freeu"]


def networks() -> dict[str, tuple]:
    unet = build_unet(unet_settings(32, (32, 64, 64), layers=2), in_channels=3, out_channels=3)
    uvit = scalelong.UViT(img_size=32, patch_size=4, embed_dim=128, depth=8, num_heads=4)
    return {"U-Net": (unet, (torch.randn(8, 3, 32, 32), torch.arange(8) * 100)),
            "U-ViT": (uvit, (torch.randn(8, 3, 32, 32), torch.arange(8) * 100))}  # fmt: skip


def step(net: torch.nn.Module, call: tuple, train: bool) -> float:
    start = time.process_time()
    with torch.set_grad_enabled(train):
        out = net(*call)
        if train:
            (out if isinstance(out, torch.Tensor) else out.sample).square().mean().backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = []
    for name, (net, call) in networks().items():
        cases, base = {}, sum(p.numel() for p in net.parameters())
        for case in CASES:
            spec = scalelong.NormScaling(over="both") if case == "norm-both" else parse_scaling(case)
            made = copy.deepcopy(net)
            cases[case] = scalelong.apply(made, spec)
        ratios = {case: [] for case in CASES}
        for round_ in range(options.rounds + 1):
            inference = {case: case.startswith(("skip", "freeu")) for case in CASES}
            times = {case: step(made, call, True) for case, made in cases.items() if not inference[case]}
            evals = {case: step(cases[case], call, False) for case in ("none", "skip-tuning:0.8", "freeu")}
            for case in CASES if round_ else ():  # the first round warms up
                own, other = (evals, evals) if inference[case] else (times, times)
                ratios[case].append(own[case] / other["none"])
        for case, values in ratios.items():
            low, median, high = statistics.quantiles(values, n=4)
            added = sum(p.numel() for p in scalelong.parameters(cases[case]))
            row = {
                "network": name,
                "case": case,
                "ratio": round(median, 3),
                "quartiles": [round(low, 3), round(high, 3)],
            }
            rows.append({**row, "parameters": added, "network_parameters": base})
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        record = {"command": "python benchmarks/studies/method_cost.py", "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
