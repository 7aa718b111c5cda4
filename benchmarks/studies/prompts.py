"""Do the samples of a text run on `shapes` show what their prompts say?

    scalelong train shapes --out runs/shapes
    python benchmarks/studies/prompts.py runs/shapes [--per-prompt 8] [--json FILE] [--sheet FILE.png]

The colour of a sample is the colour name nearest to the median of its coloured pixels. Number and shape are named by an
SVC on the outline, trained on drawings from other seeds. A sample is right if colour, number and shape all agree with
its prompt. Reported apart: prompts of training, and held-out ones, whose combination of words was never trained on.
Real held-out drawings are the ceiling; samples without guidance towards the prompt (guidance 0) are what chance gives.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from condition import interval
from sklearn.svm import SVC

from scalelong import load_run
from scalelong.data.images import save_grid
from scalelong.data.shapes import COLOURS, caption_of, combinations, draw
from scalelong.runs.generate import Request


def outline(images: Any) -> np.ndarray:
    """How far each pixel is from white, 0 to 1 in each image: (n, h·w)."""
    far = 255 - np.asarray(images, float).min(-1)
    return (far / np.maximum(far.max((1, 2), keepdims=True), 1)).reshape(len(far), -1)


def colour_names(images: Any) -> list[str]:
    names, palette = list(COLOURS), np.array(list(COLOURS.values()), float)
    inside = outline(images) > 0.7
    medians = [np.median(image.reshape(-1, 3)[mask], axis=0) for image, mask in zip(images, inside, strict=True)]
    return [names[int(np.linalg.norm(palette - median, axis=1).argmin())] for median in medians]


def drawings(rows: list[Any], each: int, seed: int) -> tuple[np.ndarray, list[Any]]:
    rows = rows * each
    return np.stack([draw(row, np.random.default_rng([seed, k])) for k, row in enumerate(rows)]), rows


def judge(size: int) -> Any:
    """Return a function: images, their combinations → shares of right colours, numbers and shapes, and all of them."""
    every = combinations("train") + combinations("validation")
    images, rows = drawings(every, 40, seed=11)
    assert images.shape[1] == size, f"the run must have images of {images.shape[1]} pixels, got {size}"
    svc = SVC(C=10).fit(outline(images), [f"{number} {shape}" for number, _, shape in rows])

    def judged(images: Any, rows: list[Any]) -> dict[str, Any]:
        colours, forms = colour_names(images), svc.predict(outline(images))
        right = {
            "colour": np.array([a == row[1] for a, row in zip(colours, rows, strict=True)]),
            "number and shape": np.array([a == f"{row[0]} {row[2]}" for a, row in zip(forms, rows, strict=True)]),
        }
        right["all"] = right["colour"] & right["number and shape"]
        shares: dict[str, Any] = {name: round(float(hits.mean()), 3) for name, hits in right.items()}
        return {**shares, "n": len(rows), "interval": interval(int(right["all"].sum()), len(rows))}

    return judged


def measure(folder: Path, per_prompt: int, guidance: float, sheet: Path | None) -> dict[str, Any]:
    run = load_run(folder)
    config, judged = run.config, judge(run.facts.shapes.size)
    s, result = config.sample, dict[str, Any]()
    for split, name in (("validation", "held-out prompts"), ("train", "prompts of training")):
        rows = combinations(split)
        n = per_prompt * (8 if split == "validation" else 1) * len(rows)  # 8 times fewer held-out prompts
        for strength in (guidance, 0.0) if split == "validation" else (guidance,):
            prompts = [caption_of(row) for row in rows]
            request = Request(n=n, sampler=s.sampler, steps=s.steps, guidance=strength, prompts=prompts, batch_size=128)
            images = np.concatenate(list(run.generate(request)))
            result[f"{name}, guidance {strength:g}"] = judged(images, [rows[k % len(rows)] for k in range(n)])
            if sheet is not None and strength and split == "validation":
                save_grid(images[: 8 * len(rows)], sheet, len(rows), prompts)
    result["real held-out drawings"] = judged(*drawings(combinations("validation"), 16, seed=12))
    steps = {"step": run.step, "of": config.train.steps, "batch_size": config.train.batch_size}
    cost = {"training seconds": run.metrics["seconds"].last, "scaling": config.scaling.to_dict()}
    return {"preset": config.preset, **steps, **cost, "sampler": f"{s.sampler}, {s.steps}", **result}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args()
    found = measure(options.run, options.per_prompt, options.guidance, options.sheet)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
