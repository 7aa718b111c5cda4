"""Are the samples of digits runs digits? A classifier of real digits, the pixel Fréchet distance, nearest neighbours.

    make demo
    python benchmarks/studies/digits_samples.py runs/demo [--n 256] [--seed 1] [--json FILE] [--sheet FILE.png]

For each run, and for the held-out digits as the ceiling:

- confident: share of images to which a support vector classifier of the real training digits gives p > 0.9;
- distance: Fréchet distance of the 64 pixels, in 0 … 1, to the training digits: a quarter of what
  `scalelong evaluate --extractor pixels` prints, whose pixels are in −1 … 1;
- nearest: median Euclidean distance to the nearest training digit, pixels in 0 … 1; copies of training digits would
  lie nearer than held-out digits do. `copies` is the share nearer than the nearest 1 % of the held-out digits;
- classes: how many of the ten digits the confident samples contain, and the share of the most frequent one.

The sheet has 32 samples per run, in the order of the table, below 32 held-out digits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC

from scalelong import evaluate_images
from scalelong.data import load
from scalelong.data.images import save_grid
from scalelong.runs.generate import Request
from scalelong.runs.run import find_runs

COLUMNS = {"confident": ".3f", "distance": ".3f", "nearest": ".3f", "copies": ".3f", "classes": "d", "largest": ".3f"}


def flat(images: Any) -> np.ndarray:
    return np.asarray(images).reshape(len(images), -1) / 255.0


class Judge:
    """Measures images against the real digits."""

    def __init__(self) -> None:
        real, held_out = load("digits", "train"), load("digits", "validation")
        self.held_out = np.asarray(held_out.images)
        self.classifier = SVC(probability=True, random_state=0).fit(flat(real.images), np.asarray(real.labels))
        self.neighbours = NearestNeighbors(n_neighbors=1).fit(flat(real.images))
        self.near = float(np.quantile(self._nearest(self.held_out), 0.01))

    def _nearest(self, images: np.ndarray) -> np.ndarray:
        return self.neighbours.kneighbors(flat(images))[0][:, 0]

    def __call__(self, images: np.ndarray) -> dict[str, Any]:
        probabilities, nearest = self.classifier.predict_proba(flat(images)), self._nearest(images)
        confident = probabilities.max(1) > 0.9
        found = np.bincount(probabilities.argmax(1)[confident], minlength=10)
        frechet = next(iter(evaluate_images(images, "digits:train", "pixels").values.values()))
        return {
            "n": len(images),
            "confident": round(float(confident.mean()), 3),
            "distance": round(frechet.value / 4, 4),
            "nearest": round(float(np.median(nearest)), 4),
            "copies": round(float((nearest < self.near).mean()), 4),
            "classes": int((found > 0).sum()),
            "largest": round(float(found.max() / max(1, found.sum())), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or the folder of a comparison")
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args()
    judge = Judge()
    rows, sheet = {"held-out digits": judge(judge.held_out[: options.n])}, [judge.held_out[:32]]
    for run in find_runs(options.runs):
        s = run.config.sample
        request = Request(n=options.n, sampler=s.sampler, steps=s.steps, guidance=s.guidance, seed=options.seed)
        images = np.concatenate(list(run.generate(request)))
        facts = {
            "preset": run.config.preset,
            "scaling": run.config.scaling.label,
            "step": run.step,
            "sampler": s.sampler,
        }
        rows[run.name] = {**judge(images), **facts, "sampler_steps": s.steps}
        sheet.append(images[:32])
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>10}" for name in COLUMNS))
    for name, row in rows.items():
        print(f"{name:<{width}}", *(f"{row[column]:>10{form}}" for column, form in COLUMNS.items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.sheet:
        save_grid(np.concatenate(sheet), options.sheet, 32)


if __name__ == "__main__":
    main()
