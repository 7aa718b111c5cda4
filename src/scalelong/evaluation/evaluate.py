"""Evaluations: images against a reference, evaluation.json, and the ranking of evaluations whose cards allow it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from scalelong.data import CATALOG, load
from scalelong.errors import EvaluationError, EvaluationWarning, InvalidValueError, suggestion, unknown
from scalelong.evaluation.card import Card, Generation, from_json, now, versions
from scalelong.evaluation.extractors import Extractor, FeatureExtractor, build_extractor
from scalelong.evaluation.images import FolderImages, channels_of, image_stream, rank_and_world
from scalelong.evaluation.metrics import METRICS, MetricValue, check_metrics, select_metrics
from scalelong.evaluation.reference import BATCH, Reference, dataset_reference, images_reference, read_reference
from scalelong.files import write_text

FORMAT = 1  # of evaluation.json
Differences = dict[str, dict[str, str]]  # field of the cards → name of the evaluation → value

# Fields of a card by name. These must agree for values to be ranked.
MEASURE = {
    "metric": "metric", "n": "n", "reference": "reference.content", "n of the reference": "reference.n",
    "image size": "image", "extractor": "extractor", "weights": "weights", "resize": "resize",
}  # fmt: skip
# These too, unless the comparison is about them.
GENERATION = {name: f"generation.{name}" for name in ("sampler", "evaluations", "guidance", "ema", "clip_denoised")}
# These are reported and left to the reader.
REPORTED = {
    "step": "generation.step", "effective batch": "generation.effective_batch", "versions": "versions",
    "sample seed": "generation.sample_seed", "train seed": "generation.train_seed",
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Metrics by name, such as `evaluation.values["fid"].value`, and their card."""

    values: dict[str, MetricValue]
    card: Card

    @property
    def fid(self) -> float | None:
        """FID, or None if the features are not those of FID's Inception."""
        return self._value("fid")

    @property
    def kid(self) -> float | None:
        return self._value("kid")

    @property
    def frechet(self) -> float | None:
        """The Fréchet distance: FID, or the distance of another extractor."""
        return self._value("fid") if "fid" in self.values else self._value("frechet")

    def _value(self, name: str) -> float | None:
        return self.values[name].value if name in self.values else None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of evaluation.json: `metrics` and `card`, and the most used values at the top level."""
        stored = ("value", "interval", "details")  # the card has the rest
        metrics: dict[str, Any] = {}
        for name, value in self.values.items():
            label = METRICS[name].label if name in METRICS else name
            fields = {key: item for key, item in asdict(value).items() if key in stored}
            metrics[name] = {**fields, "label": label.format(extractor=self.card.extractor)}
        frechet, kid = metrics.get("fid") or metrics.get("frechet") or {}, metrics.get("kid", {})
        return {
            "format": FORMAT, "fid": self.fid, "frechet": self.frechet, "frechet_interval": frechet.get("interval"),
            "kid": self.kid, "kid_spread": kid.get("details", {}).get("spread"), "kid_interval": kid.get("interval"),
            "metrics": metrics, "card": asdict(self.card),
        }  # fmt: skip

    def save(self, path: Path | str) -> None:
        """Write evaluation.json atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        """Read an evaluation.json, also of versions without `metrics`."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise EvaluationError(f"expected format {FORMAT}")
            card = from_json(Card, data.get("card"), "card")
            metrics = data["metrics"] if "metrics" in data else _old_metrics(data)
            values = from_json(dict[str, MetricValue], metrics, "metrics")
            if not values:
                raise EvaluationError("expected at least one metric, got none")
            return cls(values, card)
        except FileNotFoundError:
            raise EvaluationError(f"{path} does not exist; `scalelong evaluate RUN` writes it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise EvaluationError(f"cannot read {path} as an evaluation: {error}") from None


def _old_metrics(data: dict[str, Any]) -> dict[str, Any]:
    """Build `metrics` from an evaluation.json that has top-level values only."""
    card = data["card"]
    frechet = {"value": data.get("frechet"), "interval": data.get("frechet_interval")}
    metrics = {"fid" if card.get("metric") == "FID" else "frechet": frechet}
    if data.get("kid") is not None:
        details = {key: card.get(f"kid_{key}") for key in ("n", "subsets", "subset_size")}
        details["spread"] = data.get("kid_spread")
        known = {key: value for key, value in details.items() if value is not None}
        metrics["kid"] = {"value": data["kid"], "interval": data.get("kid_interval"), "details": known}
    return metrics


@dataclass(frozen=True)
class StoredMetric:
    """A metric as an evaluation.json has it. `low` and `high` are its interval, None if there is none."""

    name: str
    label: str
    value: float | None
    low: float | None
    high: float | None
    plausible: bool  # False if one constant image would be nearer to the reference


def stored_metrics(data: dict[str, Any] | None) -> list[StoredMetric]:
    """Read the metrics of an evaluation.json, also damaged, older, or with metrics that are not registered here."""
    if data is None:
        return []
    card = data["card"]
    metrics = data.get("metrics") or _old_metrics({"card": {"metric": None, **card}, **data})
    stored = []
    for name, entry in metrics.items() if isinstance(metrics, dict) else ():
        entry = entry if isinstance(entry, dict) else {}
        interval, details = (
            part if isinstance(part := entry.get(key), dict) else {} for key in ("interval", "details")
        )
        values = (entry.get("value"), interval.get("low"), interval.get("high"), details.get("constant"))
        value, low, high, constant = (v if isinstance(v, (int, float)) and abs(v) < 1e300 else None for v in values)
        label = entry.get("label") or (card.get("metric") if name in ("fid", "frechet") else name.upper())
        implausible = value is not None and constant is not None and value > constant
        stored.append(StoredMetric(str(name), str(label or name), value, low, high, not implausible))
    return stored


def evaluate_images(
    images: Any,
    reference: Any,
    extractor: Extractor = "inception",
    *,
    metrics: Collection[str] | None = None,
    n: int | None = None,
    batch_size: int = BATCH,
    name: str | None = None,
    generation: Generation | None = None,
    interval: bool = True,
    seed: int = 0,
) -> Evaluation:
    """Compute metrics of images against a reference, in one pass over the images.

    Args:
        images, reference: see `as_reference`. With several processes, an iterable holds the share of its process;
            everything else is shared out here, and every process gets the result.
        extractor: `inception` (FID), `pixels`, a network or a `FeatureExtractor`.
        metrics: names from `METRICS`; default: all that the extractor and the reference allow.
        n: number of images; default: all.
        interval: also compute 95 % intervals.

    Example::

        result = evaluate_images("samples/", "cifar10:train", n=10_000)
        result.values["fid"].value, result.values["fid"].interval
    """
    images, reference = match_channels(images, reference)
    check_counts(images, reference, n, metrics)
    network = build_extractor(extractor)
    target = as_reference(reference, network, batch_size)
    measured = as_reference(images, network, batch_size, n, name, seed)
    card = measured.card
    if card.n is None or card.image is None:
        raise EvaluationError(f"{card.name} does not record its number of images; use it as a reference only")
    names = select_metrics(metrics, network, measured.features, target.features)
    values = {name: METRICS[name].compute(measured.features, target.features, interval, seed) for name in names}
    rank, world = rank_and_world()
    notes = [note for value in values.values() for note in value.notes]
    warned = [note for value in values.values() for note in value.warnings]
    for note in warned if rank == 0 else ():
        warnings.warn(note, EvaluationWarning, stacklevel=2)
    label = METRICS[names[0]].label.format(extractor=network.name)
    return Evaluation(values, Card(
        metric=label, n=card.n, images=name or card.title, content=card.content, image=card.image,
        reference=target.card, extractor=network.name, weights=network.weights,
        width=measured.features.moments.width, resize=network.resize, generation=generation or Generation(),
        processes=world, seconds=card.seconds, created=now(), versions=versions(),
        notes=(*notes, *warned, *_notes(measured, target, network)),
    ))  # fmt: skip


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
    path = Path(source).expanduser() if isinstance(source, (str, Path)) else None
    if (dataset := dataset_name(source)) is not None:
        title, split, first = dataset
        return dataset_reference(title, split, extractor, first if n is None else n, batch_size)
    if path is not None and not path.exists():
        expected = f"a folder, a file of statistics or a dataset ({', '.join(CATALOG)})"
        close = suggestion(str(source).partition(":")[0], CATALOG)
        raise InvalidValueError(f"expected {expected}, got {str(source)!r}{close}")
    if path is not None and path.suffix in (".safetensors", ".npz") and path.is_file():
        source = read_reference(path)
    if not isinstance(source, Reference):
        return images_reference(path or source, extractor, n, batch_size, name, seed)
    card = source.card
    if n is not None and card.n is not None and n != card.n:
        raise EvaluationError(f"expected {n:,} images, but the statistics of {card.name} are of {card.n:,}")
    made_by = {"extractor": extractor.name, "weights": extractor.weights, "resize": extractor.resize}
    for field, expected in made_by.items() if card.weights is not None else ():  # a note reports an unknown origin
        if (got := getattr(card, field)) != expected:
            raise EvaluationError(f"the statistics of {card.name} have {field} {got}, expected {expected}")
    return source


def check_counts(images: Any, reference: Any, n: int | None, metrics: Collection[str] | None = None) -> None:
    """Raise if there are too few images, before any features are computed. A stream of unknown length passes."""
    available, of_reference = (_count(source) for source in (images, reference))
    if n is not None and available is not None and n > available:
        raise EvaluationError(f"expected {n:,} images, but {image_stream(images).name} has {available:,}; use fewer")
    check_metrics(metrics, n, available, of_reference)


def _count(source: Any) -> int | None:
    """Return how many images a source has, None if only reading it can tell."""
    if (dataset := dataset_name(source)) is not None:
        name, split, first = dataset
        total = len(load(name, split))
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


def _notes(measured: Reference, reference: Reference, extractor: FeatureExtractor) -> list[str]:
    """Return what a reader of the values must know, whichever the metrics are."""
    card, target = measured.card, reference.card
    notes = []
    if target.weights is None:
        notes.append(f"{target.name} does not record which network and how many images it was computed with")
    if reference.features.kept is None:
        notes.append("the reference has moments only, so metrics that need its features (KID) are missing")
    if card.content == target.content:
        notes.append("the images are the reference itself")
    if target.image is not None and card.image is not None and target.image != card.image:
        sizes = ("×".join(map(str, shape)) for shape in (card.image, target.image))
        notes.append("the images are {} and those of the reference are {}".format(*sizes))
    if not extractor.is_fid:
        notes.append(f"these are features of {extractor.name}: the values are not FID and not comparable with FID")
    return notes


@dataclass(frozen=True)
class Comparison:
    """Evaluations from best to worst, or the differences that rule out a ranking."""

    metric: str  # name of the metric that ranks
    ranking: tuple[str, ...]  # names of evaluations, best first; empty if there are differences
    differences: Differences  # in what must agree
    remarks: Differences  # in what the reader may judge
    overlapping: tuple[tuple[str, str], ...]  # neighbours in the ranking whose intervals overlap

    @property
    def comparable(self) -> bool:
        return not self.differences

    def require(self) -> None:
        """Raise an error that names the differences, if there are any."""
        listed = []
        for field, values in self.differences.items():
            listed.append(f"{field} ({', '.join(f'{value} in {name}' for name, value in values.items())})")
        if listed:
            varied = ",".join(field for field in self.differences if field in GENERATION)
            hint = f". If the comparison is about that, pass --vary {varied}" if varied else ""
            raise EvaluationError(f"cannot rank evaluations whose cards differ in {'; '.join(listed)}{hint}")


def compare(evaluations: Mapping[str, Evaluation], vary: Collection[str] = (), metric: str | None = None) -> Comparison:
    """Rank evaluations by a metric, unless their cards differ in what it depends on.

    Metric, N, reference, extractor, weights, resize and image size must agree. So must sampler, evaluations per
    sample, guidance and EMA, except those named in `vary`. `metric` defaults to the first one of the evaluations.
    """
    if len(evaluations) < 2:
        raise EvaluationError(f"a comparison needs at least 2 evaluations, got {len(evaluations)}")
    for name in vary:
        if name not in GENERATION:
            raise unknown("field to vary", name, GENERATION)
    values = {name: evaluation.values for name, evaluation in evaluations.items()}
    metric = metric or next(iter(next(iter(values.values()))))
    cards = {name: evaluation.card for name, evaluation in evaluations.items()}
    fixed = {name: path for name, path in GENERATION.items() if name not in vary}
    differences = _differences(cards, {**MEASURE, **fixed})
    remarks = _differences(cards, {**{name: GENERATION[name] for name in vary}, **REPORTED})
    if differences:
        return Comparison(metric, (), differences, remarks, ())
    shared = set.intersection(*map(set, values.values()))
    if metric not in shared:
        raise unknown("metric", metric, sorted(shared))
    higher = metric in METRICS and METRICS[metric].higher_is_better
    ranking = sorted(values, key=lambda name: values[name][metric].value, reverse=higher)
    overlapping = []
    for pair in pairwise(ranking):
        first, second = (values[name][metric].interval for name in pair)
        if first and second and first.high >= second.low and second.high >= first.low:
            overlapping.append(pair)
    return Comparison(metric, tuple(ranking), {}, remarks, tuple(overlapping))


def _differences(cards: Mapping[str, Card], fields: Mapping[str, str]) -> Differences:
    differences = {}
    for field, path in fields.items():
        values = {name: attrgetter(path)(card) for name, card in cards.items()}
        first, *others = values.values()
        if any(value != first for value in others):
            differences[field] = {name: _shown(field, cards[name], value) for name, value in values.items()}
    return differences


def _shown(field: str, card: Card, value: Any) -> str:
    """Return a field of a card as text, with names for hashes."""
    if field == "reference":
        return f"{card.reference.title} [{value[:12]}]"
    if field == "weights":
        return str(value)[:12]
    if field == "image size":
        return "×".join(str(length) for length in value)
    if field == "versions":
        return ", ".join(f"{key} {version}" for key, version in sorted(value.items()))
    return f"{value:,}" if isinstance(value, int) else str(value)
