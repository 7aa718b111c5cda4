"""Images per second: a prepared split's `batch` against a per-image PIL Dataset under a DataLoader.

Both give shuffled, randomly mirrored float32 batches in [-1, 1] of the same pictures. The ways are measured in turn,
round after round, so that a change of the machine's load falls on all of them; medians and ranges are printed.

    OMP_NUM_THREADS=1 python benchmarks/studies/data_pipeline.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import scalelong
from scalelong.data import ImageData


class FilesDataset(Dataset[Tensor]):
    """What people write: open one file, mirror it by chance, make it a tensor."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.files[index]) as opened:
            image = opened.convert("RGB")
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(127.5).sub_(1)


def make_files(folder: Path, count: int, size: int) -> list[Path]:
    """Smooth random pictures with a little noise, whose PNG files are about as large as CIFAR-10's."""
    rng = np.random.default_rng(0)
    files = []
    for number in range(count):
        rough = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(rough.resize((size, size), Image.Resampling.BICUBIC).filter(ImageFilter.SMOOTH), np.int16)
        noisy = np.clip(smooth + rng.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)
        files.append(folder / f"{number:06d}.png")
        Image.fromarray(noisy).save(files[-1])
    return files


def prepared_batches(data: ImageData, batch_size: int) -> Iterator[Tensor]:
    """One pass over the prepared data."""
    order = torch.randperm(len(data))
    for start in range(0, len(data) - batch_size + 1, batch_size):
        yield data.batch(order[start : start + batch_size], torch.rand(batch_size) < 0.5)


def images_per_second(batches: Iterator[Tensor]) -> float:
    next(batches)  # workers started, files in the page cache
    count, began = 0, time.perf_counter()
    for batch in batches:
        count += len(batch)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as name:
        os.environ["SCALELONG_CACHE"] = str(Path(name, "cache"))
        folder = Path(name, "images")
        folder.mkdir()
        files = make_files(folder, arguments.images, arguments.size)
        data = scalelong.data.load(folder)
        dataset = FilesDataset(files)

        def loader(workers: int) -> Callable[[], Iterator[Tensor]]:
            return lambda: iter(
                DataLoader(dataset, arguments.batch_size, shuffle=True, drop_last=True, num_workers=workers)
            )

        ways: dict[str, Callable[[], Iterator[Tensor]]] = {
            "scalelong batch": lambda: prepared_batches(data, arguments.batch_size),
            **{f"PIL Dataset, {workers} workers": loader(workers) for workers in (0, 1, 2)},
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for way, batches in ways.items():
                speeds[way].append(images_per_second(batches()))
        size = sum(file.stat().st_size for file in files) / len(files)

    print(
        f"{arguments.images:,} images of {arguments.size}×{arguments.size}×3, PNG files of {size:,.0f} bytes on average"
    )
    print(f"batches of {arguments.batch_size}; {torch.get_num_threads()} thread(s) on {os.cpu_count()} cores")
    for way, measured in speeds.items():
        middle = statistics.median(measured)
        print(f"{way:<24} {middle:>12,.0f} images/s   ({min(measured):,.0f} – {max(measured):,.0f})")
    ratios = [ours / max(others) for ours, *others in zip(*speeds.values(), strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"ratio to the fastest DataLoader of the same round: {ratio:.1f} ({min(ratios):.1f} – {max(ratios):.1f}, "
        f"{arguments.rounds} rounds)"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"speeds": speeds, "ratio": ratio, "png_bytes": size}, indent=1))


if __name__ == "__main__":
    main()
