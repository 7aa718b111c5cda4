"""Cards: everything that two values must share to be compared, stored next to the values as JSON."""

from __future__ import annotations

import platform
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from scalelong.errors import EvaluationError
from scalelong.version import __version__


@dataclass(frozen=True)
class Generation:
    """How the images were generated, as far as that is known; empty for a folder of images."""

    sampler: str | None = None
    evaluations: int | None = None  # of the network, per sample
    guidance: float | None = None
    ema: float | None = None  # the decay; 0 for the trained weights themselves
    sample_seed: int | None = None
    train_seed: int | None = None
    effective_batch: int | None = None  # samples per optimisation step
    step: int | None = None  # of the checkpoint
    run: str | None = None


@dataclass(frozen=True)
class ReferenceCard:
    """What a set of images is, and how its feature statistics were computed."""

    name: str
    split: str | None
    n: int | None  # number of images; None where a file of moments does not record it
    content: str  # identifies the images, or the moments, whatever their name
    image: tuple[int, ...] | None  # (h, w, c)
    extractor: str
    weights: str | None  # None where a file of moments does not record it
    resize: str | None
    seconds: float
    created: str
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReferenceCard:
        try:
            return cls(**{**data, "image": None if data["image"] is None else tuple(data["image"])})
        except (TypeError, KeyError) as error:
            raise EvaluationError(f"not the card of a reference: {error}") from None

    @property
    def title(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name


@dataclass(frozen=True)
class Card:
    """What the metrics were measured on, against what, and how."""

    metric: str  # label of the first metric: "FID", or the full name of another Fréchet distance
    n: int
    images: str
    content: str  # identifies the evaluated images
    image: tuple[int, ...]  # (h, w, c)
    reference: ReferenceCard
    extractor: str
    weights: str  # hash of the extractor's tensors, or "none"
    width: int  # of the features
    resize: str
    generation: Generation
    processes: int
    seconds: float
    created: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Card:
        """Read what `to_dict` wrote. Keys of older versions that are no longer used are ignored."""
        names = {field.name for field in fields(cls)}
        missing = sorted(names - {"notes"} - set(data))
        if missing:
            raise EvaluationError(f"the card lacks {', '.join(missing)}")
        return cls(
            **{
                **{name: data[name] for name in names if name in data},
                "image": tuple(data["image"]),
                "reference": ReferenceCard.from_dict(data["reference"]),
                "generation": Generation(**data["generation"]),
                "notes": tuple(data.get("notes", ())),
            }
        )


def versions() -> dict[str, str]:
    """Return the versions that a value depends on."""
    known = {"scalelong": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "pillow"):
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_types(record: Any) -> None:
    """Raise for a field of a dataclass whose value does not have the annotated type: the file was edited by hand."""
    hints = typing.get_type_hints(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if not _has_type(value, hints[field.name]):
            raise EvaluationError(f"{field.name} must be {field.type}, got {str(value)[:40]!r}")


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(item, arguments[1]) for item in value.values())
    if hint in (int, float):
        if isinstance(value, int) and abs(value) > 1e300:  # JSON integers may exceed every float
            return False
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)
