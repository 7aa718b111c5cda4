"""Feature statistics of a set of images with their card: computed in one pass, cached for datasets, resumable."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalelong.data import load
from scalelong.data.cache import lock_folder
from scalelong.errors import DataError, EvaluationError, ScaleLongError, invalid
from scalelong.evaluation.card import ReferenceCard, from_json, now, versions
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.images import ArrayImages, ImageStream, image_stream, rank_and_world
from scalelong.evaluation.inception import INCEPTION
from scalelong.evaluation.statistics import KEEP, FeatureAccumulator, FeatureSet, Moments
from scalelong.files import atomic_file, cache_dir
from scalelong.progress import track

BATCH = 50
UNKNOWN = "unknown"  # the extractor of a .npz that nobody stated
CHECKPOINT_SECONDS = 300  # between two saves of a long computation


@dataclass(frozen=True)
class Reference:
    """Feature statistics of a set of images, and their card."""

    features: FeatureSet
    card: ReferenceCard


@dataclass
class Extraction:
    """The state of a pass over images."""

    accumulator: FeatureAccumulator = field(default_factory=FeatureAccumulator)
    content: int = 0  # Σ SHA-256 of the images, modulo 2²⁵⁶: equal for the same images in any order
    shape: tuple[int, ...] | None = None  # (h, w, c)
    seconds: float = 0.0

    def add(self, images: Tensor, indices: Tensor, features: Tensor) -> None:
        """Add a batch of images, their indices in the whole set and their features."""
        self.accumulator.update(features, indices)
        self.shape = tuple(images.shape[1:])
        prefix = repr(self.shape).encode()
        for image in images.cpu().contiguous().numpy():
            digest = hashlib.sha256(prefix + image.tobytes()).digest()
            self.content = (self.content + int.from_bytes(digest, "little")) % 2**256

    def result(self, name: str, split: str | None, extractor: FeatureExtractor, source: str | None = None) -> Reference:
        """Return the statistics of the images so far."""
        features = self.accumulator.result()
        made_by = extractor.name, extractor.weights, extractor.resize
        facts = name, split, features.moments.n, f"{self.content:064x}", self.shape, *made_by
        return Reference(features, ReferenceCard(*facts, round(self.seconds, 1), now(), versions(), source))


def extract(
    stream: ImageStream,
    extractors: Sequence[FeatureExtractor],
    n: int | None,
    batch_size: int,
    extractions: Sequence[Extraction],
    checkpoint: Callable[[], None] = lambda: None,
) -> None:
    """Add the features of the first n images (None: all) to the extraction of each extractor, in one pass.

    The pass starts after the images that the extractions already have. Several processes each work on their own
    share, and all get the statistics of the whole set. `checkpoint` is called after every batch.
    """
    if n is not None and n < 2:
        raise invalid("n", ">= 2, because a covariance needs 2 images", n)
    if batch_size < 1:
        raise invalid("batch_size", "an integer >= 1", batch_size)
    total = n if n is not None else stream.length
    if n is not None and stream.length is not None and n > stream.length:
        raise EvaluationError(f"expected {n:,} images, but {stream.name} has {stream.length:,}")
    rank, world = rank_and_world()
    extraction = extractions[0]
    count = extraction.accumulator.count
    began = time.monotonic() - extraction.seconds
    failure: ScaleLongError | None = None
    try:
        batches = stream.batches(batch_size, count, n)
        if rank == 0:
            share = None if total is None else -(-(total - count) // world)
            batches = track(batches, f"features of {stream.name}", share, size=lambda batch: len(batch[0]))
        with torch.inference_mode():
            for images, indices in batches:
                for extractor, own in zip(extractors, extractions, strict=True):
                    own.add(images, indices, extractor(images))
                extraction.seconds = time.monotonic() - began
                checkpoint()
    except ScaleLongError as error:
        failure = error
    for own in extractions:
        _synchronize(own, failure)
        own.seconds = time.monotonic() - began
    count = extraction.accumulator.count
    if not count:
        raise EvaluationError(f"{stream.name} has no images")
    if n is not None and count != n:
        raise EvaluationError(f"expected {n:,} images, but {stream.name} has {count:,}")


def dataset_reference(
    name: str, split: str, extractor: FeatureExtractor, n: int | None = None, batch_size: int = BATCH, **options: Any
) -> Reference:
    """Return the statistics of the first n images (default: all) of a dataset's split, cached.

    `name` and `options` are those of `scalelong.data.load`. An interrupted computation resumes, and a longer one
    starts from the end of a shorter one. A second process waits for the first. Joined processes must all call it: they
    compute together if one of them, perhaps on another machine, has no file.
    """
    data = load(name, split, **options)
    total = len(data) if n is None else n
    key = json.dumps([data.fingerprint, extractor.name, extractor.weights, extractor.resize, KEEP])
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{data.name}-{data.split}-{extractor.name}").strip("-")[-100:]
    folder = cache_dir() / "reference" / f"{slug}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    done, partial = folder / f"first-{total}.safetensors", folder / "partial.safetensors"
    if _all_have(done):
        return read_reference(done)
    source = "; ".join(filter(None, (data.manifest.get("source"), data.manifest.get("resize"))))
    rank, world = rank_and_world()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder) if world == 1 else nullcontext():
        if world == 1 and done.is_file():  # by the process that this one waited for
            return read_reference(done)
        # Of several processes none holds a beginning of the images, so there is nothing to resume or to save.
        extraction = _resume(folder, total) if world == 1 else Extraction()
        saved = time.monotonic()

        def checkpoint() -> None:
            nonlocal saved
            if world == 1 and time.monotonic() - saved >= CHECKPOINT_SECONDS:
                write_reference(partial, extraction.result(data.name, data.split, extractor, source))
                saved = time.monotonic()

        stream = ArrayImages(data.images, f"{data.name} ({data.split})")
        extract(stream, [extractor], total, batch_size, [extraction], checkpoint)
        reference = extraction.result(data.name, data.split, extractor, source)
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:  # one process of every machine, whose cache may be its own
            write_reference(done, reference)
            partial.unlink(missing_ok=True)
        return reference


def images_references(
    images: Any,
    extractors: Sequence[FeatureExtractor],
    n: int | None = None,
    batch_size: int = BATCH,
    name: str | None = None,
    seed: int = 0,
) -> list[Reference]:
    """Return the statistics of a folder, an array or a stream of images (see `image_stream`) by every extractor."""
    stream = image_stream(images, name)
    extractions = [Extraction(FeatureAccumulator(seed=seed)) for _ in extractors]
    extract(stream, extractors, n, batch_size, extractions)
    split = getattr(images, "split", None)
    facts = stream.name, split if isinstance(split, str) else None
    return [own.result(*facts, extractor) for own, extractor in zip(extractions, extractors, strict=True)]


def images_reference(
    images: Any,
    extractor: FeatureExtractor,
    n: int | None = None,
    batch_size: int = BATCH,
    name: str | None = None,
    seed: int = 0,
) -> Reference:
    """Return the statistics of a folder, an array or a stream of images (see `image_stream`); not cached."""
    return images_references(images, [extractor], n, batch_size, name, seed)[0]


def write_reference(path: Path | str, reference: Reference) -> None:
    """Write statistics and card to a safetensors file."""
    features = reference.features
    tensors = {"mean": features.moments.mean, "covariance": features.moments.covariance}
    if features.kept is not None and features.ranks is not None:
        tensors |= {"kept": features.kept, "ranks": features.ranks}
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {"card": json.dumps(asdict(reference.card)), "seed": str(features.seed)})


def read_reference(path: Path | str, extractor: str | None = None) -> Reference:
    """Read statistics written by `write_reference`, or the .npz of other tools with `mu` and `sigma`.

    extractor: what a .npz was computed with, which such a file does not record: `inception`, `inception-pytorch-fid`,
        or the name of an extractor of your own.
    """
    path = Path(path)
    if path.suffix == ".npz":
        return _read_npz(path, INCEPTION.name if extractor == "inception" else extractor)
    if extractor is not None:
        raise invalid("extractor", "None for a file that records it", extractor)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            card, seed = from_json(ReferenceCard, json.loads(metadata["card"]), "card"), int(metadata.get("seed", 0))
            tensors = {name: file.get_tensor(name) for name in set(file.keys())}
        moments = Moments(card.n, tensors["mean"].double(), tensors["covariance"].double())
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a file of reference statistics ({error})") from None
    return Reference(FeatureSet(moments, tensors.get("kept"), tensors.get("ranks"), seed), card)


def _read_npz(path: Path, extractor: str | None) -> Reference:
    """Read the moments of other tools. There are no features, so no KID, and no record of what made them."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            mu, sigma = (torch.from_numpy(np.asarray(arrays[key], np.float64)) for key in ("mu", "sigma"))
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is not a file of moments with arrays mu and sigma ({error})") from None
    digest = hashlib.sha256(mu.numpy().tobytes() + sigma.numpy().tobytes()).hexdigest()
    card = ReferenceCard(
        path.stem, None, None, f"moments:{digest}", None, extractor or UNKNOWN, None, None, 0.0, now(), {}
    )
    return Reference(FeatureSet(Moments(None, mu, sigma)), card)


def _all_have(path: Path) -> bool:
    """Whether the file exists for every process, so that none returns while the others wait for it to compute."""
    found, (_, world) = path.is_file(), rank_and_world()
    everyone = [found] * world
    if world > 1:
        dist.all_gather_object(everyone, found)
    return all(everyone)


def _resume(folder: Path, limit: int) -> Extraction:
    """Continue from the stored statistics of the most images that are a beginning of the first `limit`."""
    stored = []
    for path in folder.glob("*.safetensors"):
        with suppress(ScaleLongError):
            stored.append(read_reference(path))
    usable = [reference for reference in stored if reference.card.n is not None and reference.card.n <= limit]
    best = max(usable, key=lambda reference: reference.card.n or 0, default=None)
    if best is None:
        return Extraction()
    accumulator = FeatureAccumulator.from_result(best.features)
    return Extraction(accumulator, int(best.card.content, 16), best.card.image, best.card.seconds)


def _synchronize(extraction: Extraction, failure: ScaleLongError | None) -> None:
    """Merge the passes of all processes; raise an error of one process in all of them, so that none waits."""
    _, world = rank_and_world()
    everyone: list[Any] = [None] * world
    if world > 1:
        message = None if failure is None else str(failure)
        dist.all_gather_object(everyone, (extraction.content, extraction.shape, message))
    if failure is not None:
        raise failure
    if world == 1:
        return
    for rank, (_, _, message) in enumerate(everyone):
        if message is not None:
            raise EvaluationError(f"process {rank}: {message}")
    shapes = {shape for _, shape, _ in everyone if shape is not None}
    if len(shapes) > 1:
        raise EvaluationError(f"the processes have images of different sizes: {sorted(shapes)}")
    extraction.content = sum(content for content, _, _ in everyone) % 2**256
    extraction.shape = shapes.pop() if shapes else None
    extraction.accumulator.all_reduce()
