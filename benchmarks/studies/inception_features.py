"""Images per second of FID's Inception: our path against the same weights run naively, and the two FIDs.

Naive is what one gets by loading the published TorchScript file: PIL files read one by one, batches of 50, fp32, the
TF1-style resize written with index arithmetic, features kept. Ours is `extract` on the same folder. Both read the same
CIFAR-10 test images from PNG files. They take turns, 50 images at a time, so that a change of the machine's load falls
on both; rates are of the whole run, wall and CPU time.

    OMP_NUM_THREADS=1 python benchmarks/studies/inception_features.py --n 200 --out results/inception-features.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from scalelong.data import load
from scalelong.errors import EvaluationWarning
from scalelong.evaluation import InceptionExtractor, Moments, frechet_distance
from scalelong.evaluation.card import versions
from scalelong.evaluation.images import FolderImages
from scalelong.evaluation.inception import INCEPTION
from scalelong.evaluation.reference import Extraction
from scalelong.files import sha256, write_text

BATCH = 50


@dataclass
class Clock:
    """Seconds of each batch, by the wall and of this process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, work: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def rates(self) -> dict[str, float]:
        return {
            "images_per_second": round(BATCH * len(self.wall) / sum(self.wall), 3),
            "images_per_cpu_second": round(BATCH * len(self.cpu) / sum(self.cpu), 3),
            "median_batch_images_per_second": round(BATCH / statistics.median(self.wall), 3),
        }


class Naive:
    """The published TorchScript network, as it comes."""

    def __init__(self) -> None:
        path = INCEPTION.package.folder() / INCEPTION.member
        if sha256(path) not in INCEPTION.files:
            raise SystemExit(f"{path} is not the published file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.network = torch.jit.load(str(path)).eval()
        self.features: list[Tensor] = []

    def __call__(self, files: list[Path]) -> None:
        images = []
        for file in files:
            with Image.open(file) as opened:
                images.append(torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1))
        x = (resize(torch.stack(images).float(), 299) - 128) / 128
        self.features.append(self.network(x))

    def moments(self) -> Moments:
        features = torch.cat(self.features).double().numpy()
        mean, covariance = features.mean(axis=0), np.cov(features, rowvar=False)
        return Moments(len(features), torch.from_numpy(mean), torch.from_numpy(covariance))


def resize(x: Tensor, size: int) -> Tensor:
    """TF1's bilinear by index arithmetic on all four corners, as FID tools have it."""

    def taps(length: int) -> tuple[Tensor, Tensor, Tensor]:
        position = torch.arange(size, dtype=torch.float32) * torch.tensor(length / size, dtype=torch.float32)
        low = position.long()
        return low, (low + 1).clamp_max(length - 1), position - low

    top, bottom, down = taps(x.shape[2])
    left, right, across = taps(x.shape[3])
    upper = x[:, :, top][..., left] + (x[:, :, top][..., right] - x[:, :, top][..., left]) * across
    lower = x[:, :, bottom][..., left] + (x[:, :, bottom][..., right] - x[:, :, bottom][..., left]) * across
    return upper + (lower - upper) * down[:, None]


class Ours:
    """The path of `scalelong evaluate`: a folder's stream, our network, streaming moments, the content hash."""

    def __init__(self, folder: Path, extractor: InceptionExtractor) -> None:
        self.batches = FolderImages(folder).batches(BATCH, 0, None)
        self.extractor = extractor
        self.extraction = Extraction()

    def __call__(self, files: list[Path]) -> None:
        images, indices = next(self.batches)
        self.extraction.add(images, indices, self.extractor(images))

    def moments(self) -> Moments:
        return self.extraction.accumulator.result().moments


def write_pngs(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(np.ascontiguousarray(image)).save(folder / f"{number:05d}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200, help="images on each side, a multiple of 50")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    if options.n < 2 * BATCH or options.n % BATCH:
        parser.error(f"--n {options.n} must be a multiple of {BATCH}, at least {2 * BATCH}")
    data, n = load("cifar10", "test").images, options.n
    extractor, network = InceptionExtractor(), Naive()
    clocks = {"naive": Clock(), "ours": Clock()}
    sides: dict[str, list[Moments]] = {"naive": [], "ours": []}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        warm_up(network, extractor)
        for side, rows in (("first", data[:n]), ("second", data[n : 2 * n])):
            folder = write_pngs(Path(scratch, side), rows)
            files = sorted(folder.iterdir())
            network.features.clear()
            ways: dict[str, Naive | Ours] = {"naive": network, "ours": Ours(folder, extractor)}
            for start in range(0, n, BATCH):
                for name, way in ways.items():
                    part = files[start : start + BATCH]
                    clocks[name].run(lambda way=way, part=part: way(part))
                print(f"{side} {start + BATCH}/{n}: " + describe(clocks), flush=True)
            for name, way in ways.items():
                sides[name].append(way.moments())
    report(n, clocks, sides, options.out)


def warm_up(network: Naive, extractor: InceptionExtractor) -> None:
    """TorchScript optimises itself on its first two calls; neither path is timed on its first."""
    for _ in range(3):
        network.network(torch.zeros(2, 3, 299, 299))
    extractor(torch.zeros(2, 32, 32, 3, dtype=torch.uint8))


def describe(clocks: dict[str, Clock]) -> str:
    return ", ".join(f"{name} {clock.rates()['images_per_second']:.2f} images/s" for name, clock in clocks.items())


def report(n: int, clocks: dict[str, Clock], sides: dict[str, list[Moments]], out: Path | None) -> None:
    warnings.simplefilter("ignore", EvaluationWarning)
    fids = {name: frechet_distance(*pair).value for name, pair in sides.items()}
    rates = {name: clock.rates() for name, clock in clocks.items()}
    key = "images_per_second"
    cpu = "images_per_cpu_second"
    result = {
        "command": f"OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/studies/inception_features.py --n {n}",
        "images": f"cifar10 (test), 2 × {n}, PNG files, batch {BATCH}",
        **rates,
        "speedup_wall": round(rates["ours"][key] / rates["naive"][key], 3),
        "speedup_cpu": round(rates["ours"][cpu] / rates["naive"][cpu], 3),
        "fid_naive": fids["naive"],
        "fid_ours": fids["ours"],
        "fid_relative_difference": abs(fids["ours"] / fids["naive"] - 1),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": versions(),
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if out is not None:
        write_text(out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
