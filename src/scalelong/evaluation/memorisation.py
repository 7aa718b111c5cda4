"""Memorisation: are samples nearer to training images than held-out images are?

A network that copies its training images gets an excellent FID. Here every sample is compared with its nearest training
image in feature space, and the distances with those of held-out images, which nobody can have memorised.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scalelong.data.images import save_grid
from scalelong.errors import EvaluationError
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.images import image_stream
from scalelong.evaluation.neighbours import distances
from scalelong.evaluation.reference import BATCH
from scalelong.progress import track

QUANTILE = 0.05  # of the held-out images' distances
PAIRS = 10  # on the sheet
ALONE = (0, 1)  # a process that measures reads all images: nothing is shared out


@dataclass(frozen=True)
class Pair:
    """A sample and its nearest training image."""

    sample: int
    training: int
    distance: float


@dataclass(frozen=True)
class Memorisation:
    """Distances of samples to their nearest training images, beside those of held-out images.

    share: of the samples nearer to a training image than all but 5 % of the held-out images are; 0.05 for samples that
        are to the training images as held-out images are, 1 for copies.
    p_value: of the one-sided rank test (Mann–Whitney) that samples are not nearer than held-out images.
    """

    share: float
    expected: float
    p_value: float
    median: float
    median_held_out: float
    n: int
    n_held_out: int
    n_training: int
    extractor: str
    weights: str
    pairs: tuple[Pair, ...]  # the nearest ones

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        verdict = "nearer than held-out images: some may be copies" if self.p_value < 0.01 else "no sign of copies"
        return (
            f"{self.share:.1%} of {self.n:,} samples are nearer to one of {self.n_training:,} training images than 95% "
            f"of {self.n_held_out:,} held-out images are (5% expected; median distance {self.median:.4g} against "
            f"{self.median_held_out:.4g}; p = {self.p_value:.2g}): {verdict}"
        )


def measure_memorisation(
    samples: npt.NDArray[np.uint8], training: Any, held_out: Any, extractor: FeatureExtractor, batch_size: int = BATCH
) -> Memorisation:
    """Compare samples (n, h, w, c) and held-out images with all training images. No training feature is stored.

    training, held_out: folders, arrays, `ImageData` or iterables of uint8 batches.
    """
    from scipy.stats import mannwhitneyu

    queries = [torch.cat([f for f, _ in _features(side, extractor, batch_size)]) for side in (samples, held_out)]
    if min(map(len, queries)) < 2:
        raise EvaluationError(f"memorisation needs 2 samples and 2 held-out images, got {[len(q) for q in queries]}")
    both = torch.cat(queries)
    nearest, index, count = torch.full((len(both),), torch.inf), torch.zeros(len(both), dtype=torch.int64), 0
    for features, positions in _features(training, extractor, batch_size, "training images"):
        found, which = distances(both, features).min(dim=1)
        nearer = found < nearest
        nearest, index = torch.where(nearer, found, nearest), torch.where(nearer, positions[which], index)
        count += len(features)
    own, other = nearest.split([len(query) for query in queries])
    threshold = other.quantile(QUANTILE)
    order = own.argsort()[:PAIRS].tolist()
    return Memorisation(
        share=float((own < threshold).double().mean()),
        expected=QUANTILE,
        p_value=float(mannwhitneyu(own.numpy(), other.numpy(), alternative="less").pvalue),
        median=float(own.median()),
        median_held_out=float(other.median()),
        n=len(own),
        n_held_out=len(other),
        n_training=count,
        extractor=extractor.name,
        weights=extractor.weights,
        pairs=tuple(Pair(k, int(index[k]), float(own[k])) for k in order),
    )


def save_sheet(
    result: Memorisation, samples: npt.NDArray[np.uint8], training: npt.NDArray[np.uint8], path: Path | str
) -> None:
    """Write the nearest pairs as a grid: samples in the first row, their nearest training images below."""
    rows = [samples[pair.sample] for pair in result.pairs] + [training[pair.training] for pair in result.pairs]
    captions = [f"sample {pair.sample}: {pair.distance:.4g}" for pair in result.pairs]
    save_grid(np.stack(rows), path, len(result.pairs), captions + [f"training {p.training}" for p in result.pairs])


def _features(images: Any, extractor: FeatureExtractor, size: int, name: str | None = None) -> Any:
    """Yield the features (b, D) and the positions (b,) of each batch."""
    stream = image_stream(images, name)
    batches = stream.batches(size, 0, None, share=ALONE)
    with torch.inference_mode():
        for batch, positions in track(batches, f"features of {stream.name}", stream.length, lambda part: len(part[0])):
            features: Tensor = extractor(batch)
            yield features.float().cpu(), positions
