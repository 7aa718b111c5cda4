"""Evaluations: metrics of images against a reference in one pass, and evaluation.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.errors import EvaluationError, EvaluationWarning
from scalelong.evaluation.card import Card, Generation, MetricCard, from_json, now, versions
from scalelong.evaluation.extractors import Extractor, FeatureExtractor, build_extractor
from scalelong.evaluation.images import rank_and_world
from scalelong.evaluation.metrics import METRICS, MetricValue, by_extractor, family_of, select_metrics
from scalelong.evaluation.reference import BATCH, Reference
from scalelong.evaluation.sources import as_references, check_counts, match_channels
from scalelong.evaluation.statistics import FeatureSet, kept_indices
from scalelong.files import write_text

FORMAT = 1  # of evaluation.json


@dataclass(frozen=True)
class Evaluation:
    """Metrics and the card that makes them comparable.

    Attributes:
        values: Metrics by name, such as `evaluation.values["fid"].value`.
        card: What was measured, against what, and how.

    Examples:
        >>> images = torch.randint(0, 256, (2, 80, 8, 8, 3), dtype=torch.uint8).numpy()
        >>> result = scalelong.evaluate_images(images[0], images[1], "pixels", metrics=["kid"])
        >>> result.fid is None and result.frechet is None, result.kid == result.values["kid"].value
        (True, True)
        >>> result.save("evaluation.json")
        >>> scalelong.Evaluation.load("evaluation.json").to_dict()["kid"] == result.kid
        True
    """

    values: dict[str, MetricValue]
    card: Card

    @property
    def fid(self) -> float | None:
        """FID, or None if the features are not those of FID's Inception."""
        return self._value("fid")

    @property
    def kid(self) -> float | None:
        """KID, or the kernel distance of another extractor; None if it was not computed."""
        return self._value("kid")

    @property
    def frechet(self) -> float | None:
        """The Fréchet distance: FID, or the distance of another extractor."""
        return self._value("fid") if "fid" in self.values else self._value("frechet")

    def _value(self, name: str) -> float | None:
        return self.values[name].value if name in self.values else None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of evaluation.json.

        Returns:
            `metrics` and `card`, and the most used values at the top level.
        """
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
        """Write evaluation.json atomically.

        Args:
            path: The file.
        """
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        """Read an evaluation.json, also of versions without `metrics`.

        Args:
            path: The file.

        Returns:
            The evaluation.
        """
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
    extractors: Mapping[str, Extractor] | None = None,
    captions: Sequence[str] | None = None,
) -> Evaluation:
    """Compute metrics of images against a reference, in one pass over the images.

    Args:
        images: the images to judge, see `as_reference`: a folder, uint8 (n, h, w, c), a named dataset such as
            "cifar10:test". With several processes, an iterable holds the share of its process; everything else is
            shared out here, and every process gets the result.
        reference: the images or statistics to compare with, of the same kinds.
        extractor: `inception` (FID), `inception-pytorch-fid`, `pixels`, a network or a `FeatureExtractor`.
        metrics: names from `METRICS`; default: fid or frechet, and kid. Those that are defined on DINOv2 or CLIP add
            that extractor, which computes its features once for all of them.
        n: number of images; default: all.
        batch_size: images per pass of the extractor.
        name: what the card calls the images.
        generation: how the images were made, for the card.
        interval: also compute 95 % intervals.
        seed: of the subsets and bootstraps.
        extractors: by family, "dinov2" or "clip", those to use in place of the default ones.
        captions: of the images, for `clip-score`; caption k belongs to image k.

    Returns:
        The metrics and their card.

    Examples:
        >>> images = torch.randint(0, 256, (2, 80, 8, 8, 3), dtype=torch.uint8).numpy()
        >>> result = scalelong.evaluate_images(images[0], images[1], extractor="pixels", metrics=["kid"])
        >>> result.values["kid"].interval is not None, result.card.n
        (True, 80)
    """
    images, reference = match_channels(images, reference)
    check_counts(images, reference, n, metrics)
    if captions is None and any(METRICS[metric].captioned for metric in metrics or ()):
        raise EvaluationError(
            "clip-score needs the captions of the images: pass captions=, or evaluate a run with text"
        )
    main = extractor if isinstance(extractor, str) else family_of(extractor)
    groups, others = by_extractor(metrics, main), extractors or {}
    networks = [build_extractor(extractor if key is None else others.get(key, key)) for key in groups]
    targets = as_references(reference, networks, batch_size)
    measured = as_references(images, networks, batch_size, n, name, seed)
    card = measured[0].card
    if card.n is None or card.image is None:
        raise EvaluationError(f"{card.name} does not record its number of images; use it as a reference only")
    values: dict[str, MetricValue] = {}
    entries: dict[str, MetricCard] = {}
    notes: list[str] = []
    for names, network, own, target in zip(groups.values(), networks, measured, targets, strict=True):
        features = _with_aids(own.features, network, captions, card.n)
        for metric in select_metrics(names, network, features, target.features):
            values[metric] = METRICS[metric].compute(features, target.features, interval, seed)
            label = METRICS[metric].label.format(extractor=network.name)
            width = features.moments.width
            entries[metric] = MetricCard(label, network.name, network.weights, width, network.resize)
        notes += _notes(own, target, network)
    if metrics is not None:  # in the order of the request
        values = {metric: values[metric] for metric in dict.fromkeys(metrics)}
    rank, world = rank_and_world()
    said = list(dict.fromkeys(note for value in values.values() for note in value.notes))
    warned = list(dict.fromkeys(note for value in values.values() for note in value.warnings))
    for note in warned if rank == 0 else ():
        warnings.warn(note, EvaluationWarning, stacklevel=2)
    first = entries[next(iter(values))]
    return Evaluation(values, Card(
        metric=first.label, n=card.n, images=name or card.title, content=card.content, image=card.image,
        reference=targets[0].card, extractor=first.extractor, weights=first.weights, width=first.width,
        resize=first.resize, generation=generation or Generation(), processes=world, seconds=card.seconds,
        created=now(), versions=versions(), notes=(*said, *warned, *dict.fromkeys(notes)), metrics=entries,
    ))  # fmt: skip


def _with_aids(features: FeatureSet, network: Any, captions: Sequence[str] | None, n: int) -> FeatureSet:
    """Add what some metrics need beside features: the classifier's weights, the embeddings of the captions."""
    head, embed = getattr(network, "head", None), getattr(network, "embed_text", None)
    text = None
    if captions is not None and embed is not None:
        if len(captions) != n:
            raise EvaluationError(f"expected one caption per image, got {len(captions):,} for {n:,} images")
        text = embed([captions[int(k)] for k in kept_indices(n, features.seed)])
    return replace(features, head=None if head is None else head.cpu(), text=text)


def _notes(measured: Reference, reference: Reference, extractor: FeatureExtractor) -> list[str]:
    """Return what a reader of the values must know, whichever the metrics are."""
    card, target = measured.card, reference.card
    notes = []
    if target.weights is None:
        notes.append(f"{target.name} does not record its network and number of images: {target.extractor} as stated")
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
