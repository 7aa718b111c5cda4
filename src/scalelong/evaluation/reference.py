"""Reference statistics: computed once for a dataset and an extractor, cached with their card, resumable."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalelong.errors import ScaleLongError
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.features import BATCH, Extracted, Progress, extract
from scalelong.evaluation.images import ArrayImages, image_stream, place
from scalelong.evaluation.statistics import KEEP, FeatureAccumulator, FeatureSet, Moments
from scalelong.evaluation.versions import now, versions
from scalelong.files import atomic_file, cache_dir

CHECKPOINT_SECONDS = 300  # between two savings of a long computation


@dataclass(frozen=True)
class ReferenceCard:
    """What a figure is measured against."""

    name: str
    split: str | None
    n: int | None  # images that the statistics are of; None where a file of moments does not tell
    content: str  # identifies the images, or the moments, whatever their name
    image: tuple[int, ...] | None  # (h, w, c)
    extractor: str
    weights: str | None  # None where a file of moments does not tell
    resize: str | None
    seconds: float
    created: str
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> ReferenceCard:
        try:
            image = facts["image"]
            return cls(**{**facts, "image": None if image is None else tuple(image)})
        except (TypeError, KeyError) as error:
            raise ScaleLongError(f"this is not the card of a reference: {error}") from None


@dataclass(frozen=True)
class Reference:
    """A reference's statistics and its card."""

    features: FeatureSet
    card: ReferenceCard


def dataset_reference(
    name: str,
    split: str,
    extractor: FeatureExtractor,
    n: int | None = None,
    batch_size: int = BATCH,
    **options: Any,
) -> Reference:
    """The statistics of the first n images (all by default) of a dataset's split, from the cache or computed now.

    `name` and `options` are those of `scalelong.data.load`. A computation that was interrupted goes on where it was,
    and a longer one starts from a shorter one's end.
    """
    from scalelong.data import load

    data = load(name, split, **options)
    total = len(data) if n is None else n
    label = f"{data.name} ({data.split})"
    if total > len(data):
        raise ScaleLongError(f"{total:,} images were asked for and {label} has {len(data):,}")
    folder = _cache_folder(data.name, data.split, data.fingerprint, extractor)
    done = folder / f"first-{total}.safetensors"
    if done.is_file():
        return read_reference(done)
    partial = folder / "partial.safetensors"

    def reference_of(extracted: Extracted) -> Reference:
        return Reference(extracted.features, _card(data.name, data.split, extractor, extracted))

    def save(progress: Progress) -> None:
        write_reference(partial, reference_of(progress.so_far()))

    rank, world = place()
    alone = world == 1  # several processes hold parts, of which none is a beginning
    before, saver = (_farthest(folder, total), _NowAndThen(save)) if alone else (None, None)
    stream = ArrayImages(data.images, label)
    reference = reference_of(extract(stream, extractor, total, batch_size, progress=before, checkpoint=saver))
    if rank == 0:
        write_reference(done, reference)
        partial.unlink(missing_ok=True)
    return reference


def images_reference(
    images: Any, extractor: FeatureExtractor, n: int | None = None, batch_size: int = BATCH, name: str | None = None
) -> Reference:
    """The statistics of a folder, an array or a stream of images (see `image_stream`); not cached."""
    stream = image_stream(images, name)
    split = getattr(images, "split", None)
    extracted = extract(stream, extractor, n, batch_size)
    card = _card(stream.name, split if isinstance(split, str) else None, extractor, extracted)
    return Reference(extracted.features, card)


def write_reference(path: Path | str, reference: Reference) -> None:
    """Statistics and card in one safetensors file."""
    from safetensors.torch import save_file

    features = reference.features
    tensors = {"mean": features.moments.mean, "covariance": features.moments.covariance}
    if features.kept is not None and features.ranks is not None:
        tensors |= {"kept": features.kept, "ranks": features.ranks}
    with atomic_file(path) as aside:
        save_file(tensors, aside, metadata={"card": json.dumps(reference.card.to_dict())})


def read_reference(path: Path | str) -> Reference:
    """Statistics written by `write_reference`, or pytorch-fid's .npz of `mu` and `sigma`."""
    path = Path(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            card = ReferenceCard.from_dict(json.loads((file.metadata() or {})["card"]))
            names = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        moments = Moments(card.n, tensors["mean"].double(), tensors["covariance"].double())
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ScaleLongError(f"{path} is not a file of reference statistics ({error})") from None
    return Reference(FeatureSet(moments, tensors.get("kept"), tensors.get("ranks")), card)


def _read_npz(path: Path) -> Reference:
    """Other tools' moments: no count, no images, no features, so no KID and no check of what made them."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            mu, sigma = (torch.from_numpy(np.asarray(arrays[key], np.float64)) for key in ("mu", "sigma"))
    except (OSError, KeyError, ValueError) as error:
        raise ScaleLongError(f"{path} is not a file of moments with arrays mu and sigma ({error})") from None
    digest = hashlib.sha256(mu.numpy().tobytes() + sigma.numpy().tobytes()).hexdigest()
    card = ReferenceCard(path.stem, None, None, f"moments:{digest}", None, "unknown", None, None, 0.0, now(), {})
    return Reference(FeatureSet(Moments(None, mu, sigma)), card)


class _NowAndThen:
    """Calls a function that saves, but not after every batch."""

    def __init__(self, save: Callable[[Progress], None]) -> None:
        self._save, self._last = save, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._last >= CHECKPOINT_SECONDS:
            self._save(progress)
            self._last = time.monotonic()


def _farthest(folder: Path, limit: int) -> Progress | None:
    """The longest beginning of the images of which there are statistics already."""
    best: Reference | None = None
    for path in folder.glob("*.safetensors"):
        try:
            found = read_reference(path)
        except ScaleLongError:
            continue
        if (found.card.n or 0) <= limit and (best is None or (found.card.n or 0) > (best.card.n or 0)):
            best = found
    if best is None:
        return None
    accumulator = FeatureAccumulator.from_result(best.features)
    return Progress(accumulator, int(best.card.content, 16), best.card.image, best.card.seconds)


def _cache_folder(name: str, split: str, fingerprint: str, extractor: FeatureExtractor) -> Path:
    facts = json.dumps([fingerprint, extractor.name, extractor.weights, extractor.resize, KEEP])
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{name}-{split}-{extractor.name}").strip("-")[-100:]
    return cache_dir() / "reference" / f"{slug}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _card(name: str, split: str | None, extractor: FeatureExtractor, extracted: Extracted) -> ReferenceCard:
    return ReferenceCard(
        name=name,
        split=split,
        n=extracted.features.n,
        content=extracted.content,
        image=extracted.shape,
        extractor=extractor.name,
        weights=extractor.weights,
        resize=extractor.resize,
        seconds=round(extracted.seconds, 1),
        created=now(),
        versions=versions(),
    )
