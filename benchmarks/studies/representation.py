"""What small networks know of classes: linear probes by block and time, with and without scaling and DDAE++'s methods.

    python benchmarks/studies/representation.py runs/representation --json results/representation.json
    python benchmarks/studies/representation.py runs/representation --cost --json results/self-conditioning-cost.json

U-ViTs of width 64 and depth 6 on Fashion-MNIST (28×28) and CIFAR-10 (16×16), 3,000 steps of 32 images. All arms of a
seed share initial weights, data order, times and noise. Finished runs are not trained again, finished measurements are
kept. FID and KID are of Inception features of 500 samples against 2,000 test images, and compare with each other only.
At equal CPU time an arm is measured at the checkpoint that the baseline's CPU time pays for. `--cost` times steps of
all arms in turns.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from scalelong.evaluation.extractors import build_extractor
from scalelong.evaluation.reference import dataset_reference
from scalelong.runs.config import ProbeConfig, override
from scalelong.runs.generate import Request
from scalelong.runs.run import Run, build_network
from scalelong.training import preset, train
from scalelong.training.examples import Examples
from scalelong.training.probing import ProbedSplits
from scalelong.training.trainer import Trainer

DATA = {  # 16 patches each
    "fashion": ("fashion-tiny", {"model.patch_size": 7}),
    "cifar10": ("cifar10-tiny", {"data.image_size": 16}),
}
STEPS, EVERY = 3000, 500
SMALL = {
    "model.embed_dim": 64, "model.depth": 6, "model.num_heads": 4, "model.init_std": 0.05657, "train.steps": STEPS,
    "train.batch_size": 32, "train.lr": 2e-3, "train.warmup": 100, "train.precision": "fp32", "ema.decay": 0.995,
    "sample.n": 0, "monitor.every": 0, "checkpoint.every": EVERY, "checkpoint.keep": 20, "validate.every": EVERY,
    "validate.n": 256, "train.log_every": 50,
}  # fmt: skip
SC, DISTILL = {"self_conditioning.block": "mid_block"}, {"distillation.weight": 0.1, "distillation.block": "mid_block"}
ARMS = {
    "none": {}, "cs": {"scaling": "cs:0.7"}, "ls": {"scaling": "ls"}, "norm": {"scaling": "norm"},
    "self-conditioning": SC, "distillation": DISTILL, "both": SC | DISTILL,
}  # fmt: skip
PROBE = ProbeConfig(t=(0.02, 0.1, 0.3))
SAMPLED = ("none", "self-conditioning", "distillation", "both")


def config_of(data: str, arm: str, seed: int):
    name, own = DATA[data]
    return override(preset(name), {**SMALL, **own, **ARMS[arm], "seed": seed})


def measure(run: Run, splits: ProbedSplits, step: int, arm: str, baselines: bool) -> dict:
    net = run.network_at(step)[0]
    untrained = build_network(run.config, run.facts.shapes).eval() if baselines else None
    result = splits.measure(net, PROBE, untrained=untrained, pixels=baselines)
    losses = dict(
        zip(run.column("val_loss_ema").steps.tolist(), run.column("val_loss_ema").values.tolist(), strict=True)
    )
    record = {"step": step, "val_loss": losses[step], **result.to_dict()}
    if arm in SAMPLED:
        request = Request(n=500, sampler="dpm-solver-fast", steps=12, batch_size=250)
        extractor = build_extractor("inception")
        reference = dataset_reference(run.config.data.name, "test", extractor, 2000, **run.config.data.options())
        values = run.evaluate(request, reference, extractor, net=net, step=step).values
        record |= {name: value.value for name, value in values.items()}
    return record


def step_costs(data: str, arms: list[str], rounds: int, settings: dict) -> dict[str, float]:
    """Median CPU seconds per step, arms in turns."""
    trainers = {}
    for arm in arms:
        config = override(config_of(data, arm, 0), settings)
        trainers[arm] = Trainer(config, Examples(config, "train"))
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for k in range(rounds + 3):
        for arm in arms if k % 2 else reversed(arms):
            started = time.process_time()
            trainers[arm].step()
            if k >= 3:
                times[arm].append(time.process_time() - started)
    return {arm: statistics.median(values) for arm, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    stored = json.loads(options.json.read_text()) if options.json.exists() else {"cells": {}}

    def save() -> None:
        stored["command"] = (
            f"python benchmarks/studies/representation.py runs/representation --json {options.json.name}"
        )
        options.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")

    if options.cost:
        size = {"model.embed_dim": 128, "model.depth": 12, "train.batch_size": 64, "data.image_size": None}
        stored = {"network": "U-ViT, width 128, depth 12, 64 patches, batch 64", "rounds": 15}
        stored["cpu_seconds"] = step_costs("cifar10", ["none", "self-conditioning"], 15, size)
        save()
        return
    if "cpu_seconds" not in stored:
        stored["cpu_seconds"] = step_costs("fashion", list(ARMS), 20, {})
        save()
    seconds, cells = stored["cpu_seconds"], stored["cells"]
    for seed in options.seeds:
        for data in DATA:
            splits = None
            for arm in ARMS:
                key = f"{data}/{arm}/{seed}"
                if key in cells:
                    continue
                config = config_of(data, arm, seed)
                run = train(config, options.runs / key.replace("/", "-"), quiet=True).run
                splits = splits or ProbedSplits(config, Examples(config, "train"), Examples(config, "test"), 3000, 2000)
                baselines = arm == "none"
                cells[key] = {"equal_steps": measure(run, splits, STEPS, arm, baselines)}
                step = max(EVERY, min(STEPS, round(STEPS * seconds["none"] / seconds[arm] / EVERY) * EVERY))
                if arm in SAMPLED and step != STEPS:
                    cells[key]["equal_cpu"] = measure(run, splits, step, arm, False)
                save()
                print(key, cells[key]["equal_steps"]["best"], flush=True)


if __name__ == "__main__":
    main()
