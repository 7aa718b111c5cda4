"""The card beside a figure: everything that another figure must share with it to be compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from scalelong.errors import ScaleLongError
from scalelong.evaluation.fields import said
from scalelong.evaluation.reference import ReferenceCard

FORMAT = 1  # of evaluation.json


@dataclass(frozen=True)
class Generation:
    """How the images were made, as far as it is known: nothing, for a folder of images."""

    sampler: str | None = None
    evaluations: int | None = None  # of the network, a sample
    guidance: float | None = None
    ema: float | None = None  # the decay; 0 for the trained weights themselves
    sample_seed: int | None = None
    train_seed: int | None = None
    effective_batch: int | None = None  # samples that one optimisation step saw
    step: int | None = None  # of the checkpoint
    run: str | None = None


@dataclass(frozen=True)
class Card:
    """What a Fréchet distance or KID was measured on, against, with and by."""

    metric: str  # "FID", or the Fréchet distance's full name
    n: int
    images: str
    content: str  # identifies the evaluated images
    image: tuple[int, ...]  # (h, w, c)
    reference: ReferenceCard
    extractor: str
    weights: str  # hash of the extractor's numbers
    width: int  # of the features
    rank: int  # of the images' covariance
    resize: str
    kid_n: int | None  # images behind KID: all, or a random sample of them
    kid_subsets: int | None
    kid_subset_size: int | None
    generation: Generation
    processes: int
    seconds: float
    created: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Card:
        """A card that `to_dict` made, perhaps by way of JSON."""
        names = {field.name for field in fields(cls)}
        missing = sorted(names - {"notes"} - set(facts))
        if missing:
            raise ScaleLongError(f"the card lacks {', '.join(missing)}")
        try:
            return cls(
                **{
                    **{name: facts[name] for name in names if name in facts},
                    "image": tuple(facts["image"]),
                    "reference": ReferenceCard.from_dict(facts["reference"]),
                    "generation": Generation(**facts["generation"]),
                    "notes": tuple(facts.get("notes", ())),
                }
            )
        except TypeError as error:
            raise ScaleLongError(f"the card cannot be read ({said(error)})") from None


# What two figures must share to be ranked, as (what it is called, how it is read from a card).
MEASURE = {
    "metric": lambda card: card.metric,
    "n": lambda card: card.n,
    "reference": lambda card: card.reference.content,
    "n of the reference": lambda card: card.reference.n,
    "image size": lambda card: card.image,
    "extractor": lambda card: card.extractor,
    "weights": lambda card: card.weights,
    "resize": lambda card: card.resize,
}
# These too, unless the comparison is about them.
MAKING = {
    "sampler": lambda card: card.generation.sampler,
    "evaluations": lambda card: card.generation.evaluations,
    "guidance": lambda card: card.generation.guidance,
    "ema": lambda card: card.generation.ema,
}
# These are told and left to the reader.
TOLD = {
    "step": lambda card: card.generation.step,
    "effective batch": lambda card: card.generation.effective_batch,
    "sample seed": lambda card: card.generation.sample_seed,
    "train seed": lambda card: card.generation.train_seed,
    "versions": lambda card: card.versions,
}


def shown(name: str, card: Card) -> str:
    """A field of a card as a message has it: names for hashes."""
    if name == "reference":
        split = f" ({card.reference.split})" if card.reference.split else ""
        return f"{card.reference.name}{split} [{card.reference.content[:12]}]"
    value = {**MEASURE, **MAKING, **TOLD}[name](card)
    if name == "weights":
        return str(value)[:12]
    if name == "image size":
        return "×".join(str(length) for length in value)
    if name == "versions":
        return ", ".join(f"{key} {version}" for key, version in sorted(value.items()))
    return f"{value:,}" if isinstance(value, int) else str(value)
