"""Images against a reference: metrics by name with intervals, and the card that makes them comparable."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.errors import EvaluationError, EvaluationWarning, InvalidValueError, suggestion
from scalelong.evaluation.card import Card, Generation, from_json, now, versions
from scalelong.evaluation.extractors import FeatureExtractor, build_extractor
from scalelong.evaluation.images import rank_and_world
from scalelong.evaluation.metrics import METRICS, MetricValue, select_metrics
from scalelong.evaluation.reference import BATCH, Reference, dataset_reference, images_reference, read_reference
from scalelong.files import write_text

FORMAT = 1  # of evaluation.json
Extractor = str | nn.Module | FeatureExtractor


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
        metrics = {name: value.to_dict() for name, value in self.values.items()}
        frechet, kid = metrics.get("fid") or metrics.get("frechet") or {}, metrics.get("kid", {})
        return {
            "format": FORMAT,
            "fid": self.fid,
            "frechet": self.frechet,
            "frechet_interval": frechet.get("interval"),
            "kid": self.kid,
            "kid_spread": kid.get("details", {}).get("spread"),
            "kid_interval": kid.get("interval"),
            "metrics": metrics,
            "card": self.card.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """Read the content of an evaluation.json, also of versions without `metrics`."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise EvaluationError(f"expected an evaluation in format {FORMAT}")
        card = from_json(Card, data.get("card"), "card")
        metrics = data["metrics"] if "metrics" in data else _old_metrics(data)
        values = from_json(dict[str, MetricValue], metrics, "metrics")
        if not values:
            raise EvaluationError("expected at least one metric, got none")
        return cls(values, card)

    def save(self, path: Path | str) -> None:
        """Write evaluation.json atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        """Read an evaluation.json."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise EvaluationError(f"{path} does not exist; `scalelong evaluate RUN` writes it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise EvaluationError(f"cannot read {path} as an evaluation: {error}") from None


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
        images: a folder, an array uint8 (n, h, w, c), an `ImageData`, an iterable of uint8 batches (b, h, w, c), a
            `Reference`, or a dataset such as `cifar10:test`. With several processes, an iterable holds the share of
            its process; everything else is shared out here, and every process gets the result.
        reference: see `as_reference`.
        extractor: `inception` (FID), `pixels`, a network or a `FeatureExtractor`.
        metrics: names from `METRICS`; default: all that the extractor and the reference allow.
        n: number of images; default: all.
        interval: also compute 95 % intervals.

    Example::

        result = evaluate_images("samples/", "cifar10:train", n=10_000)
        result.values["fid"].value, result.values["fid"].interval
    """
    network = build_extractor(extractor)
    target = as_reference(reference, network, batch_size=batch_size)
    _check_made_by(target, network)
    measured = _measure(images, network, n, batch_size, name, seed)
    card = measured.card
    if card.n is None or card.image is None:
        raise EvaluationError(f"{card.name} does not record its number of images; use it as a reference only")
    names = select_metrics(metrics, network, measured.features, target.features)
    values = {name: METRICS[name].compute(measured.features, target.features, interval, seed) for name in names}
    rank, world = rank_and_world()
    warned = [note for value in values.values() for note in value.warnings]
    for note in warned if rank == 0 else ():
        warnings.warn(note, EvaluationWarning, stacklevel=2)
    notes = [note for value in values.values() for note in value.notes]
    return Evaluation(
        values,
        Card(
            metric=METRICS[names[0]].label.format(extractor=network.name),
            n=card.n,
            images=name or card.title,
            content=card.content,
            image=card.image,
            reference=target.card,
            extractor=network.name,
            weights=network.weights,
            width=measured.features.moments.width,
            resize=network.resize,
            generation=generation or Generation(),
            processes=world,
            seconds=card.seconds,
            created=now(),
            versions=versions(),
            notes=(*notes, *warned, *_notes(measured, target, network)),
        ),
    )


def as_reference(reference: Any, extractor: FeatureExtractor, batch_size: int = BATCH) -> Reference:
    """Return the statistics of whatever names a reference.

    A dataset, optionally with its split (default: train) and a number of images (`cifar10`, `cifar10:test`,
    `cifar10:train:10000`), a folder of images, a file of statistics (.safetensors, or pytorch-fid's .npz), an
    `ImageData`, an array or an iterable of batches.
    """
    if isinstance(reference, Reference):
        return reference
    named = dataset_name(reference)
    if named is not None:
        name, split, n = named
        return dataset_reference(name, split, extractor, n, batch_size)
    if not isinstance(reference, (str, Path)):
        return images_reference(reference, extractor, batch_size=batch_size)
    path = Path(reference).expanduser()
    if path.suffix in (".safetensors", ".npz") and path.is_file():
        return read_reference(path)
    if not path.exists():
        from scalelong.data import CATALOG

        close = suggestion(str(reference).partition(":")[0], CATALOG)
        raise InvalidValueError(
            f"reference must be a folder, a file of statistics or a dataset ({', '.join(CATALOG)}), "
            f"got {str(reference)!r}{close}"
        )
    return images_reference(path, extractor, batch_size=batch_size)


def dataset_name(text: Any) -> tuple[str, str, int | None] | None:
    """Parse NAME[:SPLIT[:N]] where NAME is a known dataset; None for anything else."""
    from scalelong.data import CATALOG

    if not isinstance(text, (str, Path)):
        return None
    name, split, n, *more = [*str(text).split(":"), "", "", ""]
    if name not in CATALOG:
        return None
    if any(more) or (n and not n.isdecimal()):
        raise InvalidValueError(f"a dataset must have the form NAME[:SPLIT[:N]], got {str(text)!r}")
    return name, split or "train", int(n) if n else None


def _measure(
    images: Any, extractor: FeatureExtractor, n: int | None, batch_size: int, name: str | None, seed: int
) -> Reference:
    """Return the statistics of the evaluated images."""
    named = dataset_name(images)
    if named is not None:
        images = dataset_reference(named[0], named[1], extractor, named[2] if n is None else n, batch_size)
    if not isinstance(images, Reference):
        return images_reference(images, extractor, n, batch_size, name, seed)
    _check_made_by(images, extractor)
    if n is not None and images.card.n is not None and n != images.card.n:
        raise EvaluationError(
            f"expected {n:,} images, but the statistics of {images.card.name} are of {images.card.n:,}"
        )
    return images


def _check_made_by(reference: Reference, extractor: FeatureExtractor) -> None:
    """Raise if other features were used. Moments of unknown origin pass; a note says so."""
    card = reference.card
    for field in ("extractor", "weights", "resize") if card.weights is not None else ():
        stored, expected = getattr(card, field), getattr(extractor, "name" if field == "extractor" else field)
        if stored != expected:
            raise EvaluationError(f"the statistics of {card.name} have {field} {stored}, expected {expected}")


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


def _old_metrics(data: dict[str, Any]) -> dict[str, Any]:
    """Build `metrics` from an evaluation.json that has top-level values only."""
    card = data["card"]
    frechet = {"value": data.get("frechet"), "interval": data.get("frechet_interval")}
    metrics = {"fid" if card["metric"] == "FID" else "frechet": frechet}
    if data.get("kid") is not None:
        details = {key: card.get(f"kid_{key}") for key in ("n", "subsets", "subset_size")}
        details = {
            key: value for key, value in {**details, "spread": data.get("kid_spread")}.items() if value is not None
        }
        metrics["kid"] = {"value": data["kid"], "interval": data.get("kid_interval"), "details": details}
    return metrics
