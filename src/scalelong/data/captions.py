"""Captions: checked where they enter, kept as one UTF-8 file with offsets, read one at a time."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from scalelong.data.records import BadExampleError

MAX_CHARACTERS = 10_000


def clean_captions(captions: Iterable[str], name: str) -> tuple[str, ...]:
    """Captions with single spaces, empty ones dropped; at least one must remain."""
    kept = tuple(caption for caption in (clean_caption(caption, name) for caption in captions) if caption)
    if not kept:
        raise BadExampleError(name, "has no caption")
    return kept


def clean_caption(caption: str, name: str) -> str:
    """One caption on one line, or the error that says what is wrong with it."""
    if not isinstance(caption, str):
        raise BadExampleError(name, f"has a caption that is not text but {type(caption).__name__}")
    if len(caption) > MAX_CHARACTERS:
        raise BadExampleError(name, f"has a caption of {len(caption):,} characters; {MAX_CHARACTERS:,} are allowed")
    for character in caption:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            raise BadExampleError(name, f"has a control character (U+{ord(character):04X}) in its caption")
    return " ".join(caption.split())


class Captions(Sequence[str]):
    """Captions by image, memory-mapped. `captions[i]` is the first of image i, `captions.of(i)` all of them."""

    def __init__(
        self,
        text: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
    ) -> None:
        self._text = text  # every caption's UTF-8 bytes, one after the other
        self._offsets = offsets  # (m + 1): caption j is bytes offsets[j]:offsets[j + 1]
        self.starts = starts  # (n + 1): image i has captions starts[i]:starts[i + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def total(self) -> int:
        """How many captions there are over all images."""
        return len(self._offsets) - 1

    def caption(self, number: int) -> str:
        """Caption `number` of `total`."""
        return bytes(self._text[self._offsets[number] : self._offsets[number + 1]]).decode("utf-8", "replace")

    def of(self, index: int) -> list[str]:
        """All captions of image `index`."""
        return [self.caption(number) for number in range(self.starts[index], self.starts[index + 1])]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return self.caption(int(self.starts[index % len(self)]))
