"""Run folders for the tests of the report, with the files that training, the monitor and evaluation write."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from scalelong.data.images import save_grid
from scalelong.training.presets import choose


def make_run(
    folder: Path,
    scaling: str = "none",
    seed: int = 0,
    *,
    steps: int = 400,
    level: float = 1.0,
    calm: float = 1.0,
    skips: int = 6,
    logged: int | None = None,
    samples: int = 2,
    side: int = 8,
    channels: int = 1,
    card: bool = True,
    settings: list[str] | None = None,
    captions: list[str] | None = None,
) -> Path:
    """A run whose validation loss is `level` times a common curve and whose jumps are `calm` times common ones."""
    config = replace(choose("digits-uvit", scaling=scaling, steps=steps, settings=settings or []), seed=seed)
    folder.mkdir(parents=True)
    record = {
        "config": config.to_dict(),
        "shapes": {"channels": channels, "size": side},
        "parameters": 123456,
        "device": "cpu",
        "versions": {"torch": "2.13.0", "scalelong": "0.1"},
    }
    (folder / "config.json").write_text(json.dumps(record))
    random = np.random.default_rng(seed)
    write_metrics(folder, random, steps if logged is None else logged, level)
    write_snapshots(folder, random, steps, skips, calm, scaling)
    for k in range(samples):
        pictures = random.integers(0, 256, (16, side, side, channels), dtype=np.uint8)
        save_grid(pictures, folder / "samples" / f"step-{steps * (k + 1) // samples:08d}.png", captions=captions)
        real = np.random.default_rng(9).integers(0, 256, (16, side, side, channels), dtype=np.uint8)
        save_grid(real, folder / "samples" / "real.png", captions=captions)
    resources = {"format": 2, "cpu_seconds": 50.0 + seed, "wall_seconds": 60.0, "peak_memory": 4e8}
    (folder / "resources.json").write_text(json.dumps(resources | {"other_cpu_seconds": 30.0}))
    robustness = {
        "format": 1, "edges": [0.0, 0.5, 1.0], "metric": "Fréchet distance of 8×8 pixels (not FID)",
        "sensitivity": [
            {"variance": v, "overall": {"change": v * level, "gain": 1.0, "loss": 0.4 + v}} for v in (0.0, 0.01, 0.1)
        ],
        "distances": [{"variance": v, "value": 20 + v, "low": 19.0, "high": 22.0} for v in (0.0, 0.01, 0.1)],
        "lipschitz": [{"network": 2.0 * level}, {"network": 3.0}],
    }  # fmt: skip
    (folder / "robustness.json").write_text(json.dumps(robustness))
    if card:
        (folder / "distance.json").write_text(json.dumps(make_card(20.0 * level + seed, steps, folder.name)))
    return folder


def write_metrics(folder: Path, random: np.random.Generator, steps: int, level: float) -> None:
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(10, steps + 1, 10):
            base = 0.4 + 0.6 * math.exp(-step / 100)
            row = {"step": step, "loss": base * level * float(np.exp(random.normal(0, 0.05))), "lr": 1e-3}
            row |= {"grad_norm": float(np.exp(random.normal(0, 0.2))), "images": step * 64, "seconds": step * 0.1}
            if step % 50 == 0:
                row |= {"val_loss": base * level, "val_loss_ema": base * level * 1.1}
            file.write(json.dumps(row) + "\n")


def write_snapshots(
    folder: Path, random: np.random.Generator, steps: int, skips: int, calm: float, scaling: str
) -> None:
    blocks = [f"in_blocks.{k}" for k in range(skips)] + ["mid_block"] + [f"out_blocks.{k}" for k in range(skips)]
    header = {
        "step": 0, "format": 1, "network": "UViT", "blocks": [*blocks, "(network)"], "times": [0.0, 0.5, 1.0],
        "skips": [{"i": i, "from": f"in_blocks.{i - 1}", "to": f"out_blocks.{skips - i}"} for i in range(1, skips + 1)],
    }  # fmt: skip
    kappa = [0.7**i if scaling == "cs" else 1.0 for i in range(skips)]
    with open(folder / "stability.jsonl", "w") as file:
        file.write(json.dumps(header) + "\n")
        for step in range(10, steps + 1, 10):
            norms = [round(float(10 + i + random.normal(0, calm)), 4) for i in range(skips)]
            snapshot = {
                "step": step,
                "train": {"backbone": [v * (1 + step / 1000) for v in norms]},
                "probe": {"backbone": norms, "skip": norms, "out": norms, "ratio": [k * 1.2 for k in kappa]},
                "kappa": {"mean": kappa, "min": [k * 0.9 for k in kappa] if scaling == "ls" else kappa, "max": kappa},
                "grad": {"total": 1.0, "blocks": [0.1] * len(header["blocks"])},
                "jump": {
                    "probe": {"backbone": (0.05 * calm * random.normal(size=skips)).tolist()},
                    "train": {"backbone": (0.1 * calm * random.normal(size=skips)).tolist()},
                    "grad": {
                        "total": float(0.2 * random.normal()),
                        "blocks": (0.2 * random.normal(size=len(header["blocks"]))).tolist(),
                    },
                },
            }
            if step == 100:
                snapshot["alarms"] = [
                    {"kind": "loss", "module": "UViT", "since": 100, "text": "step 100: the loss jumped"}
                ]
            file.write(json.dumps(snapshot) + "\n")


def make_card(value: float, step: int, run: str) -> dict:
    return {
        "format": 1, "fid": None, "frechet": value, "frechet_interval": {"low": value - 1, "high": value + 1},
        "kid": 0.01, "kid_interval": None,
        "card": {
            "metric": "Fréchet distance of 8×8 pixels (not FID)", "n": 256, "extractor": "8×8 pixels",
            "weights": "0123456789abcdef", "resize": "averaged to 8×8", "created": "2026-01-01T00:00:00+00:00",
            "reference": {"name": "digits", "split": "train", "n": 1500},
            "generation": {"sampler": "dpm-solver-fast", "evaluations": 50, "step": step, "run": run},
            "notes": ["compare it with figures at N = 256 alone"],
        },
    }  # fmt: skip


def noisy_picture(path: Path, side: int) -> None:
    """An incompressible PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(data).save(path)
