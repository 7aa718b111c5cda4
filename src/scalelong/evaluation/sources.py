"""What holds or names images: datasets, folders, arrays, streams and files of statistics, as references."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from scalelong.data import CATALOG, load
from scalelong.errors import EvaluationError, InvalidValueError, suggestion
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.images import FolderImages, channels_of, image_stream
from scalelong.evaluation.metrics import check_metrics
from scalelong.evaluation.reference import (
    BATCH,
    UNKNOWN,
    Reference,
    dataset_reference,
    images_reference,
    images_references,
    read_reference,
)


@dataclass(frozen=True)
class DatasetImages:
    """Images of a dataset as `scalelong.data.load` reads it with options; its feature statistics are cached."""

    name: str
    split: str = "train"
    n: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, source: Any) -> DatasetImages | None:
        """Return NAME[:SPLIT[:N]] where NAME is a known dataset; None for anything else."""
        if isinstance(source, DatasetImages):
            return source
        parsed = dataset_name(source)
        return None if parsed is None else cls(*parsed)


def as_references(
    source: Any,
    extractors: Sequence[FeatureExtractor],
    batch_size: int = BATCH,
    n: int | None = None,
    name: str | None = None,
    seed: int = 0,
) -> list[Reference]:
    """Return `as_reference` for every extractor. Images that are not cached are read once for all of them."""
    cached = DatasetImages.parse(source) is not None or isinstance(source, Reference) or _statistics_file(source)
    if len(extractors) == 1 or cached:
        return [as_reference(source, extractor, batch_size, n, name, seed) for extractor in extractors]
    return images_references(_checked_path(source) or source, extractors, n, batch_size, name, seed)


def as_reference(
    source: Any,
    extractor: FeatureExtractor,
    batch_size: int = BATCH,
    n: int | None = None,
    name: str | None = None,
    seed: int = 0,
) -> Reference:
    """Return the feature statistics of the first n images (default: all) of whatever holds or names images.

    A dataset, optionally with its split (default: train) and a number of images (`cifar10`, `cifar10:test`,
    `cifar10:train:10000`), a folder of images, a file of statistics (.safetensors, or pytorch-fid's .npz), a
    `Reference`, an `ImageData`, a uint8 array (n, h, w, c) or an iterable of such batches.
    """
    if (dataset := DatasetImages.parse(source)) is not None:
        first = dataset.n if n is None else n
        return dataset_reference(dataset.name, dataset.split, extractor, first, batch_size, **dataset.options)
    path = _checked_path(source)
    if _statistics_file(source):
        assert path is not None
        source = read_reference(path)
    if not isinstance(source, Reference):
        return images_reference(path or source, extractor, n, batch_size, name, seed)
    card = source.card
    if n is not None and card.n is not None and n != card.n:
        raise EvaluationError(f"expected {n:,} images, but the statistics of {card.name} are of {card.n:,}")
    if card.extractor == UNKNOWN:
        raise EvaluationError(
            f"the statistics of {card.name} do not record their extractor, and the resize matters: "
            "state it with --reference-extractor (in Python: read_reference(path, extractor)): inception for "
            "TensorFlow's resize, inception-pytorch-fid for pytorch-fid's"
        )
    stated = {"extractor": extractor.name, "weights": extractor.weights, "resize": extractor.resize}
    for key, expected in stated.items():
        if (got := getattr(card, key)) is not None and got != expected:  # a .npz has neither weights nor resize
            raise EvaluationError(f"the statistics of {card.name} have {key} {got}, expected {expected}")
    return source


def _checked_path(source: Any) -> Path | None:
    """Return the path that `source` is, or None if it is not text; raise if nothing is there."""
    path = Path(source).expanduser() if isinstance(source, (str, Path)) else None
    if path is not None and not path.exists():
        expected = f"a folder, a file of statistics or a dataset ({', '.join(CATALOG)})"
        close = suggestion(str(source).partition(":")[0], CATALOG)
        raise InvalidValueError(f"expected {expected}, got {str(source)!r}{close}")
    return path


def _statistics_file(source: Any) -> bool:
    path = _checked_path(source) if DatasetImages.parse(source) is None else None
    return path is not None and path.suffix in (".safetensors", ".npz") and path.is_file()


def check_counts(images: Any, reference: Any, n: int | None, metrics: Collection[str] | None = None) -> None:
    """Raise if there are too few images, before any features are computed. A stream of unknown length passes."""
    available, of_reference = (_count(source) for source in (images, reference))
    if n is not None and available is not None and n > available:
        dataset = DatasetImages.parse(images)
        name = image_stream(images).name if dataset is None else f"{dataset.name} ({dataset.split})"
        raise EvaluationError(f"expected {n:,} images, but {name} has {available:,}; use fewer")
    check_metrics(metrics, n, available, of_reference)


def _count(source: Any) -> int | None:
    """Return how many images a source has, None if only reading it can tell."""
    if (dataset := DatasetImages.parse(source)) is not None:
        name, split, first = dataset.name, dataset.split, dataset.n
        total = len(load(name, split, **dataset.options))
        if first is not None and first > total:
            raise EvaluationError(
                f"expected {first:,} images, but {name} ({split}) has {total:,}; use a smaller number"
            )
        return total if first is None else first
    if isinstance(source, Reference):
        return None if source.features.kept is None else source.card.n
    holder = getattr(source, "images", source)
    return len(holder) if isinstance(holder, (np.ndarray, Tensor)) else getattr(source, "length", None)


def match_channels(images: Any, reference: Any, channels: int | None = None) -> tuple[Any, Any]:
    """Read a folder of grey images as grey, unless what it is compared with has colour.

    `channels` are those of `images` where these are a stream.
    """
    sources = [_folder_or_same(images), _folder_or_same(reference)]
    if 3 in (channels, *map(_channels, sources)):
        for source in sources:
            if isinstance(source, FolderImages):
                source.channels = 3
    return sources[0], sources[1]


def _folder_or_same(source: Any) -> Any:
    is_path = isinstance(source, (str, Path)) and dataset_name(source) is None
    return FolderImages(Path(source).expanduser()) if is_path and Path(source).expanduser().is_dir() else source


def _channels(source: Any) -> int | None:
    if isinstance(source, Reference):
        return source.card.image[-1] if source.card.image else None
    named = dataset_name(source)
    return CATALOG[named[0]].channels if named else channels_of(source)


def dataset_name(text: Any) -> tuple[str, str, int | None] | None:
    """Parse NAME[:SPLIT[:N]] where NAME is a known dataset; None for anything else."""
    if not isinstance(text, (str, Path)):
        return None
    name, split, n, *more = [*str(text).split(":"), "", "", ""]
    if name not in CATALOG:
        return None
    if any(more) or (n and not n.isdecimal()):
        raise InvalidValueError(f"a dataset must have the form NAME[:SPLIT[:N]], got {str(text)!r}")
    return name, split or "train", int(n) if n else None
