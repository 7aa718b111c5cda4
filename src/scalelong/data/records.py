"""What every source of images is turned into on its way to the cache: one example at a time, good or bad."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.errors import ScaleLongError

Pixels = npt.NDArray[np.uint8]  # (h, w, c)


@dataclass(frozen=True)
class Example:
    """One image with what is known about it."""

    name: str  # what a message calls it: a file, a row
    image: Pixels
    label: int | None = None
    captions: tuple[str, ...] = ()


class BadExampleError(ScaleLongError):
    """Raised while one example is read; stops the preparation, or is counted under `skip_bad`."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = shown(name), reason
        super().__init__(f"{self.name} {reason}")


class SourceUnavailableError(ScaleLongError):
    """A source that cannot be had here; the next one is tried."""


@dataclass(frozen=True)
class Options:
    """Everything that decides what the prepared images are, apart from where they come from."""

    image_size: int | None = None
    channels: int | None = None
    background: str | None = None
    holdout: float = 0.0
    config: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    caption_column: str | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and not (isinstance(self.image_size, int) and 1 <= self.image_size <= 4096):
            raise ScaleLongError(f"image_size is {self.image_size!r}; it must be a whole number from 1 to 4096")
        if self.channels not in (None, 1, 3):
            raise ScaleLongError(f"channels is {self.channels!r}; it must be 1 (grey) or 3 (colour)")
        if not 0 <= self.holdout < 1:
            raise ScaleLongError(f"holdout is {self.holdout!r}; it must be at least 0 and less than 1")
        if self.background is not None:
            colour(self.background)


@dataclass(frozen=True)
class Reading:
    """A split as its source gives it. A job makes one example, or raises `BadExampleError`."""

    jobs: Iterable[Callable[[], Example]]
    source: str
    total: int | None = None
    class_names: tuple[str, ...] | None = None
    captioned: bool = False
    shape: tuple[int, ...] | None = None  # (h, w, c) that every image must have; by default the first one's
    decodes: bool = False  # jobs decode images, so that threads help
    notes: dict[str, Any] = field(default_factory=dict)  # for the manifest


def colour(name: str) -> tuple[int, int, int]:
    """An RGB triple for a colour's name or its hexadecimal form."""
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError:
        raise ScaleLongError(f"background is {name!r}; it must be a colour such as white, black or #rrggbb") from None
    return red, green, blue


def shown(name: str) -> str:
    """A name that is safe to print: one line, no control characters, no unpaired surrogates."""
    return name if name.isprintable() else ascii(name)


def check_label(label: int, count: int, name: str) -> int:
    """The label, if it is one of `count` classes."""
    if not 0 <= label < count:
        raise BadExampleError(name, f"has label {label}, which is out of range: the classes are 0…{count - 1}")
    return label
