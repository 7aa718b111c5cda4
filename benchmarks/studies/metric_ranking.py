"""How well do FID, KID and MIND rank CIFAR-10 and graded corruptions of it, with 500 to 10,000 samples?

    python benchmarks/studies/metric_ranking.py features --out FOLDER [--chunks N]   # resumes
    python benchmarks/studies/metric_ranking.py rank --features FOLDER --json results/metric-ranking.json

The reference is CIFAR-10's test split. The sets are 10,000 training images each, no image in two sets: clean ones, and
ones with Gaussian noise or blur.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter

from scalelong.data import load

SIZE, CHUNK = 10_000, 500
Corruption = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def noise(sigma: float) -> Corruption:
    """Add Gaussian noise of `sigma` grey levels."""
    return lambda images, random: np.clip(images + random.normal(0, sigma, images.shape), 0, 255).round()


def blur(radius: float) -> Corruption:
    """Blur with a Gaussian of `radius` pixels."""
    kernel = ImageFilter.GaussianBlur(radius)
    return lambda images, random: np.stack([np.asarray(Image.fromarray(image).filter(kernel)) for image in images])


# name → split, first image, corruption; chunks of all sets are computed in turn
SETS: dict[str, tuple[str, int, Corruption]] = {
    "reference": ("test", 0, lambda images, random: images),
    "clean": ("train", 0, lambda images, random: images),
    "noise 8": ("train", 10_000, noise(8)),
    "blur 0.5": ("train", 20_000, blur(0.5)),
    "noise 4": ("train", 30_000, noise(4)),
}


def extract(folder: Path, chunks: int) -> None:
    """Store Inception features of every set, 500 images per file, `chunks` files in this call."""
    from scalelong.evaluation import build_extractor

    todo = [(name, k) for k in range(SIZE // CHUNK) for name in SETS]
    todo = [(name, k) for name, k in todo if not (folder / name / f"{k:02d}.npy").exists()]
    if not todo:
        print("done")
        return
    extractor = build_extractor("inception")
    for name, k in todo[:chunks]:
        split, first, corrupt = SETS[name]
        start = first + k * CHUNK
        images = np.asarray(load("cifar10", split).images[start : start + CHUNK])
        images = corrupt(images, np.random.default_rng(start)).astype(np.uint8)
        with torch.inference_mode():
            features = torch.cat([extractor(part) for part in torch.from_numpy(images).split(50)])
        path = folder / name / f"{k:02d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path.with_suffix(".part.npy"), features.numpy())
        path.with_suffix(".part.npy").rename(path)
        print(name, k, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    features = commands.add_parser("features")
    features.add_argument("--out", type=Path, required=True)
    features.add_argument("--chunks", type=int, default=10**6)
    options = parser.parse_args()
    extract(options.out, options.chunks)


if __name__ == "__main__":
    main()
