"""Ranking figures, if their cards let them be ranked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scalelong.errors import ScaleLongError, unknown
from scalelong.evaluation.card import MAKING, MEASURE, TOLD, Card, shown
from scalelong.evaluation.evaluate import Evaluation


@dataclass(frozen=True)
class Difference:
    """One field in which cards differ, and its value in each, by name of the evaluation."""

    field: str
    values: dict[str, str]

    def __str__(self) -> str:
        listed = ", ".join(f"{value} in {name}" for name, value in self.values.items())
        return f"{self.field} ({listed})"


@dataclass(frozen=True)
class Comparison:
    """Evaluations from best to worst, or the differences that forbid it."""

    ranking: tuple[str, ...]  # names, the smallest distance first; empty if there are differences
    differences: tuple[Difference, ...]  # in what matters
    remarks: tuple[Difference, ...]  # in what the reader may weigh
    overlapping: tuple[tuple[str, str], ...]  # neighbours in the ranking whose intervals overlap

    @property
    def comparable(self) -> bool:
        return not self.differences

    def require(self) -> None:
        """Raise the sentence that names the differences, if there are any."""
        if self.differences:
            listed = "; ".join(str(difference) for difference in self.differences)
            varied = [difference.field for difference in self.differences if difference.field in MAKING]
            hint = f". If that is what is compared, give --vary {','.join(varied)}" if varied else ""
            raise ScaleLongError(f"these figures cannot be ranked, for their cards differ in {listed}{hint}")


def compare(evaluations: Mapping[str, Evaluation], vary: Collection[str] = ()) -> Comparison:
    """Rank evaluations by their Fréchet distance, unless their cards differ in what it depends on.

    Metric, N, reference, extractor, weights, resize and image size must agree. So must sampler, evaluations a
    sample, guidance and EMA, except those named in `vary`, which the comparison then is about.
    """
    if len(evaluations) < 2:
        raise ScaleLongError(f"a comparison needs at least 2 evaluations, got {len(evaluations)}")
    for name in vary:
        if name in MEASURE:
            raise ScaleLongError(f"{name} is what makes figures comparable and cannot vary ({', '.join(MAKING)} can)")
        if name not in MAKING:
            raise unknown("field", name, MAKING)
    cards = {name: evaluation.card for name, evaluation in evaluations.items()}
    asked = {**MEASURE, **{name: read for name, read in MAKING.items() if name not in vary}}
    differences = _differences(cards, asked)
    remarks = _differences(cards, {**{name: MAKING[name] for name in vary}, **TOLD})
    ranking = () if differences else tuple(sorted(evaluations, key=lambda name: evaluations[name].frechet))
    overlapping = tuple(
        (better, worse) for better, worse in pairwise(ranking) if _overlap(evaluations[better], evaluations[worse])
    )
    return Comparison(ranking, differences, remarks, overlapping)


def _differences(cards: Mapping[str, Card], fields: Mapping[str, Callable[[Card], Any]]) -> tuple[Difference, ...]:
    found = []
    for name, read in fields.items():
        values = [read(card) for card in cards.values()]
        if any(value != values[0] for value in values):
            found.append(Difference(name, {who: shown(name, card) for who, card in cards.items()}))
    return tuple(found)


def _overlap(better: Evaluation, worse: Evaluation) -> bool:
    first, second = better.frechet_interval, worse.frechet_interval
    return first is not None and second is not None and first.high >= second.low
