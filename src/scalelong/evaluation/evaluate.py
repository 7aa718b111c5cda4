"""Images against a reference: FID and KID with their intervals, and the card that makes them comparable."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.errors import EvaluationWarning, ScaleLongError, suggestion
from scalelong.evaluation.card import FORMAT, Card, Generation
from scalelong.evaluation.extractors import FeatureExtractor, build_extractor
from scalelong.evaluation.features import BATCH, Extracted, extract
from scalelong.evaluation.fields import check_fields, said
from scalelong.evaluation.frechet import FrechetDistance, frechet_distance
from scalelong.evaluation.images import image_stream, place
from scalelong.evaluation.interval import Interval, bootstrap
from scalelong.evaluation.kernel import kernel_distance
from scalelong.evaluation.reference import Reference, dataset_reference, images_reference, read_reference
from scalelong.evaluation.versions import now, versions
from scalelong.files import write_text

Extractor = str | nn.Module | FeatureExtractor


@dataclass(frozen=True)
class Evaluation:
    """Figures and their card."""

    frechet: float  # the Fréchet distance, which is FID where the extractor is FID's
    frechet_interval: Interval | None
    kid: float | None
    kid_spread: float | None
    kid_interval: Interval | None
    card: Card

    @property
    def fid(self) -> float | None:
        """FID, or None where another network than FID's Inception gave the features."""
        return self.frechet if self.card.metric == "FID" else None

    def to_dict(self) -> dict[str, Any]:
        """What evaluation.json holds."""
        return {
            "format": FORMAT,
            "fid": self.fid,
            "frechet": self.frechet,
            "frechet_interval": None if self.frechet_interval is None else self.frechet_interval.to_dict(),
            "kid": self.kid,
            "kid_spread": self.kid_spread,
            "kid_interval": None if self.kid_interval is None else self.kid_interval.to_dict(),
            "card": self.card.to_dict(),
        }

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Evaluation:
        """What `to_dict` gave."""
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ScaleLongError(f"this is not an evaluation in format {FORMAT}")
        try:
            intervals = {
                name: None if facts[name] is None else Interval(**facts[name])
                for name in ("frechet_interval", "kid_interval")
            }
            card = Card.from_dict(facts["card"])
            found = cls(facts["frechet"], kid=facts["kid"], kid_spread=facts["kid_spread"], card=card, **intervals)
        except (KeyError, TypeError, AttributeError) as error:
            raise ScaleLongError(f"this evaluation cannot be read: {said(error)}") from None
        for part in (found, card, card.reference, card.generation, found.frechet_interval, found.kid_interval):
            if part is not None:
                check_fields(part)
        return found

    def save(self, path: Path | str) -> None:
        """Write evaluation.json, whole or not at all."""
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        """Read an evaluation.json."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ScaleLongError(f"{path} is not there; scalelong evaluate RUN writes it") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ScaleLongError(f"{path} cannot be read as an evaluation: {error}") from None


def evaluate_images(
    images: Any,
    reference: Any,
    extractor: Extractor = "inception",
    *,
    n: int | None = None,
    batch_size: int = BATCH,
    name: str | None = None,
    generation: Generation | None = None,
    kid: bool = True,
    interval: bool = True,
    seed: int = 0,
) -> Evaluation:
    """FID (or another extractor's Fréchet distance) and KID of images against a reference.

    `images`: a folder, an array uint8 (n, h, w, c), an `ImageData`, an iterable of uint8 batches (b, h, w, c), or
    what has statistics already: a `Reference`, or a dataset's name such as `cifar10:test`. `reference`: whatever
    `as_reference` takes. `n`: how many images, by default all there are. In several processes, an iterable gives
    each process its own share; all else is shared out here. Every process gets the result.
    """
    network = build_extractor(extractor)
    target = as_reference(reference, network, batch_size=batch_size)
    _check_reference(target, network)
    measured, extracted = _measured(images, network, n, batch_size, name, seed)
    frechet = frechet_distance(extracted.features.moments, target.features.moments)
    features, others = extracted.features.kept, target.features.kept
    kernel = kernel_distance(features, others) if kid and features is not None and others is not None else None
    around = around_kid = None
    if interval and features is not None:
        count = _count(extracted)
        around = bootstrap(frechet.value, frechet.influence(features), count, seed=seed)
        around_kid = None if kernel is None else bootstrap(kernel.value, kernel.influence, len(features), seed=seed)
    notes = _notes(extracted, target, network, frechet, kid and kernel is None)
    return Evaluation(
        frechet=frechet.value,
        frechet_interval=around,
        kid=None if kernel is None else kernel.value,
        kid_spread=None if kernel is None or math.isnan(kernel.spread) else kernel.spread,
        kid_interval=around_kid,
        card=Card(
            metric="FID" if network.is_fid else f"Fréchet distance of {network.name} (not FID)",
            n=_count(extracted),
            images=measured,
            content=extracted.content,
            image=extracted.shape,
            reference=target.card,
            extractor=network.name,
            weights=network.weights,
            width=extracted.features.moments.width,
            rank=frechet.rank,
            resize=network.resize,
            kid_n=None if kernel is None or features is None else len(features),
            kid_subsets=None if kernel is None else kernel.subsets,
            kid_subset_size=None if kernel is None else kernel.subset_size,
            generation=generation or Generation(),
            processes=place()[1],
            seconds=round(extracted.seconds, 1),
            created=now(),
            versions=versions(),
            notes=notes,
        ),
    )


def as_reference(reference: Any, extractor: FeatureExtractor, batch_size: int = BATCH) -> Reference:
    """A reference from what names one.

    A dataset's name, with its split and a number of images if not all of its training set (`cifar10`,
    `cifar10:test`, `cifar10:train:10000`), a folder of images, a file of statistics (.safetensors, or pytorch-fid's
    .npz), an `ImageData`, an array or an iterable of batches.
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
        raise ScaleLongError(
            f"the reference {str(reference)!r} is neither a folder, a file of statistics nor a dataset{close} "
            f"(datasets: {', '.join(CATALOG)})"
        )
    return images_reference(path, extractor, batch_size=batch_size)


def dataset_name(text: Any) -> tuple[str, str, int | None] | None:
    """(name, split, number of images) where `text` names a known dataset."""
    from scalelong.data import CATALOG

    if not isinstance(text, (str, Path)):
        return None
    name, split, n, *more = [*str(text).split(":"), "", "", ""]
    if name not in CATALOG:
        return None
    if any(more) or (n and not n.isdecimal()):
        raise ScaleLongError(f"{str(text)!r} is not a dataset with its split and number of images: NAME[:SPLIT[:N]]")
    return name, split or "train", int(n) if n else None


def _measured(
    images: Any, extractor: FeatureExtractor, n: int | None, batch_size: int, name: str | None, seed: int
) -> tuple[str, Extracted]:
    """The statistics of the images, and what to call them."""
    named = dataset_name(images)
    if named is not None:
        images = dataset_reference(named[0], named[1], extractor, named[2] if n is None else n, batch_size)
    if not isinstance(images, Reference):
        stream = image_stream(images, name)
        return stream.name, extract(stream, extractor, n, batch_size, seed=seed)
    _check_reference(images, extractor)
    card = images.card
    if card.n is None or card.image is None:
        raise ScaleLongError(f"{card.name} does not tell how many images it is of; only a reference may be so")
    if n is not None and n != card.n:
        raise ScaleLongError(f"{n:,} images were asked for and the statistics of {card.name} are of {card.n:,}")
    shown = name or card.name + (f" ({card.split})" if card.split else "")
    return shown, Extracted(images.features, card.content, card.image, card.seconds)


def _check_reference(reference: Reference, extractor: FeatureExtractor) -> None:
    card = reference.card
    if card.weights is None:
        return  # moments of unknown making: the widths are compared later, and a note says so
    for what, theirs, ours in (
        ("extractor", card.extractor, extractor.name),
        ("weights", card.weights, extractor.weights),
        ("resize", card.resize, extractor.resize),
    ):
        if theirs != ours:
            raise ScaleLongError(f"the statistics of {card.name} were made with {what} {theirs}, not {ours}")


def _notes(
    extracted: Extracted, reference: Reference, extractor: FeatureExtractor, frechet: FrechetDistance, no_kid: bool
) -> tuple[str, ...]:
    """What a reader of the figure must know; what spoils it is also a warning."""
    n, width = _count(extracted), extracted.features.moments.width
    notes = [f"the distance is biased upwards for finite N: compare it with figures at N = {n:,} alone"]
    sides = (("images", n, frechet.rank), ("images of the reference", reference.card.n, frechet.rank_reference))
    short = [
        f"{count:,} {what} are too few for {width:,} features: their covariance has rank {rank:,}, "
        "and the distance says more about N than about the images"
        for what, count, rank in sides
        if count is not None and count <= width
    ]
    if place()[0] == 0:
        for note in short:
            warnings.warn(note, EvaluationWarning, stacklevel=3)
    notes += short
    if reference.card.weights is None:
        notes.append(f"{reference.card.name} does not tell which network and how many images made it")
    if no_kid:
        notes.append("no KID: the reference has no features, only moments")
    if extracted.content == reference.card.content:
        notes.append("the images are the reference itself")
    if reference.card.image is not None and reference.card.image != extracted.shape:
        notes.append(f"the images are {_sides(extracted.shape)} and the reference's are {_sides(reference.card.image)}")
    if not extractor.is_fid:
        notes.append(f"features of {extractor.name}: this is not FID and compares with no FID")
    return tuple(notes)


def _count(extracted: Extracted) -> int:
    n = extracted.features.n
    assert n is not None
    return n


def _sides(shape: tuple[int, ...]) -> str:
    return "×".join(str(length) for length in shape)
