"""What small networks know of classes: linear probes by block and time, with and without scaling and DDAE++'s methods.

    python benchmarks/studies/representation.py train runs/representation
    python benchmarks/studies/representation.py measure runs/representation --json results/representation.json

U-ViTs of width 64 and depth 6 on Fashion-MNIST (28×28) and CIFAR-10 (16×16), 500 steps of 32 images, three seeds. All
arms of a seed share initial weights, data order, times and noise. `train` resumes, and skips what is finished.
"""

import argparse
from pathlib import Path

from scalelong.runs.config import override
from scalelong.training import preset, train

DATA = {  # 16 patches each
    "fashion": ("fashion-tiny", {"model.patch_size": 7}),
    "cifar10": ("cifar10-tiny", {"data.image_size": 16}),
}
SMALL = {
    "model.embed_dim": 64, "model.depth": 6, "model.num_heads": 4, "model.init_std": 0.05657, "train.steps": 500,
    "train.batch_size": 32, "train.lr": 1e-3, "train.warmup": 50, "ema.decay": 0.99, "sample.n": 0, "monitor.every": 0,
    "checkpoint.every": 50, "checkpoint.keep": 20, "validate.every": 50, "validate.n": 512,
}  # fmt: skip
ARMS = {
    "none": {},
    "cs": {"scaling": "cs:0.7"},
    "ls": {"scaling": "ls"},
    "norm": {"scaling": "norm"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for seed in options.seeds:
        for data, (name, own) in DATA.items():
            for arm, settings in ARMS.items():
                config = override(preset(name), {**SMALL, **own, **settings, "seed": seed})
                train(config, options.runs / f"{data}-{arm}-{seed}")


if __name__ == "__main__":
    main()
