"""Which part of a dataset is meant by `train`, `validation` or `test`, by one rule for every kind of source."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from scalelong.errors import ScaleLongError, suggestion

ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val"),
    "test": ("test", "testing"),
}


@dataclass(frozen=True)
class Part:
    """A split that the source has, and whether only its held-out (True) or its other (False) images are meant."""

    split: str
    held_out: bool | None = None

    def takes(self, name: str, share: float) -> bool:
        """Whether the example of that name belongs to it: by a hash of the name, the same on every machine."""
        if self.held_out is None:
            return True
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        return (int.from_bytes(digest[:8], "big") < share * 2**64) == self.held_out


def canonical(split: str) -> str:
    """`train`, `validation` or `test` for their usual spellings; any other name as it is."""
    for name, aliases in ALIASES.items():
        if split.lower() in aliases:
            return name
    return split


def choose(split: str, available: Collection[str], holdout: float, where: str) -> Part:
    """The part meant by `split`.

    `validation` is the source's validation split; else the held-out share of `train`, if one is given; else the
    test split.
    """
    wanted = canonical(split)
    carve = holdout > 0 and "train" in available and "validation" not in available
    if wanted in ("train", "validation") and carve:
        return Part("train", wanted == "validation")
    if wanted in available:
        return Part(wanted)
    if wanted == "validation" and "test" in available:
        return Part("test")
    hint = suggestion(split, available)
    if wanted == "validation":
        hint = "; give holdout (--holdout 0.05) to keep a share of the images for validation"
    raise ScaleLongError(f"{where} has no split {split!r}{hint} (it has: {', '.join(sorted(available))})")
