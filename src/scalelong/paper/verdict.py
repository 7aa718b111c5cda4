"""The rule by which a claim of the paper is judged, stated before any result was seen.

A claim names a quantity and the region where the paper's statement puts it: a ratio of losses below 1, a norm above 1,
a share above 0.97. The quantity is measured with a 95 % interval: Student's t over the seeds, paired by seed where two
variants are compared (same data order, noise and initial weights).

    agrees                            the whole interval lies inside the region
    disagrees                         the whole interval lies outside of it
    no difference seen at this size   the interval reaches over the region's edge
    no verdict                        there is no interval: fewer than two seeds, or samples that are no images

A distance is judged only where it is below tr Σ of the data's features, the distance of samples that all are the
data's mean: above it, samples are no images and their distance says nothing. (This sentence was added when the first
samples of the campaign had been looked at. It withholds verdicts and gives none.)

Nothing is left out or run again because of what it shows. Intervals are not corrected for their number: of
twenty claims without an effect, one leaves "no difference seen" by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scalelong.experiments.statistics import Estimate

AGREES = "agrees"
UNSEEN = "no difference seen at this size"
DISAGREES = "disagrees"
OPEN = "no verdict"
VERDICTS = (AGREES, UNSEEN, DISAGREES, OPEN)


@dataclass(frozen=True)
class Region:
    """An open interval of the quantity: where the paper puts it."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"below {self.high:g}"
        return f"above {self.low:g}" if math.isinf(self.high) else f"between {self.low:g} and {self.high:g}"


def below(edge: float) -> Region:
    return Region(high=edge)


def above(edge: float) -> Region:
    return Region(low=edge)


def judge(estimate: Estimate | None, region: Region) -> str:
    """The verdict on one claim."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return OPEN
    if region.low < estimate.low and estimate.high < region.high:
        return AGREES
    if estimate.high <= region.low or estimate.low >= region.high:
        return DISAGREES
    return UNSEEN


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the quantity that tests it, where the paper puts it, and what was measured."""

    text: str
    quantity: str
    region: Region
    estimate: Estimate | None
    paper: str = ""  # the paper's own figure for it

    @property
    def verdict(self) -> str:
        return judge(self.estimate, self.region)

    def to_dict(self) -> dict[str, Any]:
        ends = [None if math.isinf(end) else end for end in (self.region.low, self.region.high)]
        return {
            "claim": self.text,
            "quantity": self.quantity,
            "predicted": str(self.region),
            "region": ends,
            "measured": None if self.estimate is None else self.estimate.to_dict(),
            "paper": self.paper,
            "verdict": self.verdict,
        }
