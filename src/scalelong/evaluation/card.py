"""Cards: everything that two values must share to be compared, stored next to the values as JSON."""

import platform
import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
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
    clip_denoised: bool | None = None  # whether the predicted image was clamped at every step
    labels: str | None = None  # how labels or captions were drawn
    autoencoder: str | None = None  # that decoded the samples, and the factor on its latents
    selection: str | None = None  # how the checkpoint was chosen, if not as the last one
    minimum_over: int | None = None  # evaluations that the chosen checkpoint is the best of
    objective: str | None = None  # what the network was trained to predict
    far_share: float | None = None  # of the samples that left the data's range before the final clamp


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
    source: str | None = None  # where a dataset's images came from and how they were resized

    @property
    def title(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name


@dataclass(frozen=True)
class MetricCard:
    """What one metric was computed from."""

    label: str
    extractor: str
    weights: str
    width: int
    resize: str


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
    metrics: dict[str, MetricCard] = field(default_factory=dict)  # by name


def versions() -> dict[str, str]:
    """Return the versions that a value depends on."""
    packages = {name: metadata.version(name) for name in ("torch", "numpy", "pillow")}
    return {"scalelong": __version__, "python": platform.python_version(), **packages}


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def from_json(kind: Any, value: Any, name: str) -> Any:
    """Build a value of type `kind` (a dataclass of this package, a container or a scalar) from JSON.

    Raises an error that names the field if the file does not hold what `kind` needs. Other keys are ignored.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # X | None
        return None if value is None else from_json(arguments[0], value, name)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        if missing := sorted(set(required) - set(value)):
            raise EvaluationError(f"{name} lacks {', '.join(missing)}")
        hints = typing.get_type_hints(kind)
        return kind(**{key: from_json(hint, value[key], key) for key, hint in hints.items() if key in value})
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(from_json(arguments[0], item, name) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: from_json(arguments[1], item, key) for key, item in value.items()}
    if kind in (int, float):
        huge = isinstance(value, int) and abs(value) > 1e300  # JSON integers may exceed every float
        if isinstance(value, (int, kind)) and not isinstance(value, bool) and not huge:
            return value
    elif origin is None and isinstance(value, kind):
        return value
    raise EvaluationError(f"{name} must be {getattr(kind, '__name__', kind)}, got {str(value)[:40]!r}")
