"""Examples on their way from a source into the cache, and the checks of their labels, captions and splits."""

import hashlib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelong.errors import DataError, MissingSplitError, invalid, printable, suggestion

Pixels = npt.NDArray[np.uint8]  # (h, w, c)
MAX_CAPTION = 10_000  # characters
MAX_CAPTION_FILE = 1 << 20  # bytes
MAX_CLASSES = 1_000_000
SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val"), "test": ("test", "testing")}


class BadExampleError(DataError):
    """One example cannot be used. Stops the preparation, or is listed in the manifest with `skip_bad`."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = printable(name), reason
        super().__init__(f"{self.name} {reason}")


@dataclass(frozen=True)
class Example:
    """One image with its label and captions, which are decoded and checked when it is written."""

    name: str  # file or row, for messages
    image: Path | bytes | Pixels | None
    label: int | None = None
    captions: Sequence[str] | Path = ()  # texts, or a file with one caption per line


@dataclass(frozen=True)
class Options:
    """Everything that determines the prepared images, apart from their source."""

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
            raise invalid("image_size", "an integer from 1 to 4096", self.image_size)
        if self.channels not in (None, 1, 3):
            raise invalid("channels", "1 (grey) or 3 (RGB)", self.channels)
        if not 0 <= self.holdout < 1:
            raise invalid("holdout", "a number >= 0 and < 1", self.holdout)
        if self.background is not None:
            from PIL import ImageColor

            try:
                ImageColor.getrgb(self.background)
            except ValueError:
                raise invalid("background", "a colour such as white or #rrggbb", self.background) from None


Decode = Callable[[Any, str, Options], Pixels]  # (image of an example, its name, options)


@dataclass(frozen=True)
class Reading:
    """One split of a source."""

    examples: Iterable[Example]
    total: int | None = None
    class_names: tuple[str, ...] | None = None
    captioned: bool = False
    shape: tuple[int, ...] | None = None  # (h, w, c) that every image must have; default: the first image's
    decode: Decode | None = None  # default: `read_image`
    source: str = ""  # a description of the source
    extra: dict[str, Any] = field(default_factory=dict)  # further manifest entries


def clean_caption(caption: str, name: str) -> str:
    """Return a caption on one line with single spaces, or raise what is wrong with it."""
    if not isinstance(caption, str):
        raise BadExampleError(name, f"has a caption of type {type(caption).__name__}, expected text")
    if len(caption) > MAX_CAPTION:
        raise BadExampleError(name, f"has a caption of {len(caption):,} characters, expected up to {MAX_CAPTION:,}")
    for character in caption:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            raise BadExampleError(name, f"has a control character (U+{ord(character):04X}) in its caption")
    return " ".join(caption.split())


def clean_captions(captions: Sequence[str] | Path, name: str) -> tuple[str, ...]:
    """Clean captions, or the lines of a file, and drop empty ones; at least one must remain."""
    if isinstance(captions, Path):
        file = captions.name
        try:
            if captions.stat().st_size > MAX_CAPTION_FILE:
                raise BadExampleError(name, f"has a caption file of more than {MAX_CAPTION_FILE >> 10} KiB")
            captions = captions.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise BadExampleError(name, f"has a caption that is not UTF-8 text ({file})") from None
        except OSError as error:
            raise BadExampleError(name, f"has no caption: cannot read {file} ({error.strerror})") from None
    cleaned = tuple(filter(None, (clean_caption(caption, name) for caption in captions)))
    if not cleaned:
        raise BadExampleError(name, "has no caption")
    return cleaned


def number_classes(labels: Collection[Any], where: str) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return class names and the number of each label. Labels are all names, or all integers >= 0."""
    kinds = {type(label) for label in labels}
    if kinds == {str}:
        names = tuple(sorted(set(labels)))
        return names, {name: index for index, name in enumerate(names)}
    if kinds != {int}:
        found = " and ".join(sorted(kind.__name__ for kind in kinds)) or "no labels"
        raise DataError(f"{where}: labels must be all names or all integers, got {found}")
    if max(labels) >= MAX_CLASSES:
        raise DataError(f"{where}: labels must count up from 0, got {max(labels)}")
    # A negative label keeps its value here; the writer rejects its example by name.
    return tuple(str(index) for index in range(max(*labels, 0) + 1)), {label: label for label in labels}


@dataclass(frozen=True)
class Part:
    """A split of a source, and whether to take only its held-out (True) or its other (False) examples."""

    split: str
    held_out: bool | None = None

    def includes(self, name: str, share: float) -> bool:
        """Whether the example of this name belongs to the part: by a hash, the same on every machine."""
        if self.held_out is None:
            return True
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        return (int.from_bytes(digest[:8], "big") < share * 2**64) == self.held_out


def canonical_split(split: str) -> str:
    """Return `train`, `validation` or `test` for their common spellings, and any other name unchanged."""
    return next((name for name, aliases in SPLITS.items() if split.lower() in aliases), split)


def choose_split(split: str, available: Collection[str], holdout: float, where: str) -> Part:
    """Return the part of a source that `split` names.

    `validation` is the source's validation split; otherwise the held-out share of `train`, if `holdout` > 0; otherwise
    its test split.
    """
    wanted = canonical_split(split)
    if wanted in ("train", "validation") and holdout > 0 and "train" in available and "validation" not in available:
        return Part("train", wanted == "validation")
    if wanted in available:
        return Part(wanted)
    if wanted == "validation" and "test" in available:
        return Part("test")
    hint = suggestion(split, available)
    if wanted == "validation":
        hint = "; set holdout (--holdout 0.05) to reserve a share of the images for validation"
    raise MissingSplitError(f"{where} has no split {split!r}{hint} (available: {', '.join(sorted(available))})")
