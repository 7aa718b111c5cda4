"""Do the samples of a run follow what they were asked for? A linear probe of real images judges them.

    scalelong train emoji-tiny --scaling cs --batch-size 32 --steps 1200 --out runs/emoji
    python benchmarks/studies/condition.py runs/emoji [--per-class 19] [--guidance 3] [--json FILE]

The probe (a ridge classifier on the pixels of real training images, averaged to at most 16×16) names the
class of an image. Asked of each class equally often: the class itself, or captions of held-out images that belong to
it. Its hits on real held-out images are the ceiling; its hits on unconditional samples (guidance 0, same seeds, held
against the same wishes) are what chance gives. Intervals: Wilson, 95 %.

For captions also `nearer`: how often, of all pairs of a sample and another caption, the sample is nearer to the real
image of its own caption than to that of the other (0.5 is chance), with a 95 % interval over the samples.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scalelong import load_run
from scalelong.data import load
from scalelong.representation.probe import wilson
from scalelong.runs.generate import Request, generate


def features(images: Any) -> np.ndarray:
    """uint8 (n, h, w, c) → (n, ≤ 16·16·c)."""
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    return torch.nn.functional.adaptive_avg_pool2d(x, min(16, x.shape[-1])).flatten(1).numpy()


def interval(hits: int, n: int) -> list[float]:
    return [round(end, 3) for end in wilson(hits / n, n)]


def nearer(images: Any, own: Any) -> dict[str, Any]:
    """Whether sample k is nearer to own[k] than to the others, by the distance of pixels less each image's mean."""
    mine, theirs = (f - f.mean(1, keepdims=True) for f in (features(images), features(own)))
    distance = np.linalg.norm(mine[:, None] - theirs[None], axis=2)  # (samples, captions)
    own_distance = distance.diagonal()[:, None]
    others = ~np.eye(len(distance), dtype=bool)
    each = np.array([(distance[k] > own_distance[k])[others[k]].mean() for k in range(len(distance))])
    half = 1.96 * each.std(ddof=1) / math.sqrt(len(each))
    return {"share": round(each.mean(), 3), "interval": [round(each.mean() - half, 3), round(each.mean() + half, 3)]}


def measure(folder: Path, per_class: int, guidance: float, steps: int) -> dict[str, Any]:
    run = load_run(folder)
    data = run.config.data
    real = load(data.name, split=data.split, image_size=data.image_size)
    held_out = load(data.name, split=data.validation, image_size=data.image_size)
    assert real.labels is not None
    assert held_out.labels is not None
    probe = make_pipeline(StandardScaler(), RidgeClassifier(alpha=100.0, class_weight="balanced"))
    probe.fit(features(real.images), np.asarray(real.labels))

    labels = np.asarray(held_out.labels)
    generator = np.random.default_rng(0)
    wanted = [label for label in np.unique(labels) if (labels == label).sum() >= per_class]
    chosen = [generator.choice(np.flatnonzero(labels == label), per_class, replace=False) for label in wanted]
    places = np.stack(chosen).T.ravel()  # the classes in turn
    asked = labels[places]
    wish: dict[str, Any] = {"classes": asked.tolist()}
    if data.text is not None:
        assert held_out.captions is not None
        wish = {"prompts": [held_out.captions[place] for place in places]}

    def hits(images: Any) -> dict[str, Any]:
        right = int((probe.predict(features(images)) == asked).sum())
        found = {"hits": right, "share": round(right / len(asked), 3), "interval": interval(right, len(asked))}
        return found | (
            {"nearer": nearer(images, np.asarray(held_out.images)[places])} if data.text is not None else {}
        )

    def samples(guidance: float) -> np.ndarray:
        request = Request(n=len(asked), steps=steps, guidance=guidance, **wish)
        return np.concatenate(list(generate(run.net, run.config, run.facts, request)))

    return {
        "preset": run.config.preset, "step": run.step, "batch_size": run.config.train.batch_size,
        "scaling": run.config.scaling.to_dict(), "n": len(asked),
        "classes": len(wanted), "sampler": f"dpm-solver-fast, {steps}",
        "real held-out images": hits(np.asarray(held_out.images)[places]),
        f"samples, guidance {guidance:g}": hits(samples(guidance)),
        "samples, guidance 1": hits(samples(1.0)),
        "unconditional samples": hits(samples(0.0)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--per-class", type=int, default=19)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.run, options.per_class, options.guidance, options.steps)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
