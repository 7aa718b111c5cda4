"""Ranking evaluations whose cards allow it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

from scalelong.errors import EvaluationError, InvalidValueError, unknown
from scalelong.evaluation.card import Card
from scalelong.evaluation.evaluate import Evaluation
from scalelong.evaluation.metrics import METRICS

# Fields of a card by name. These must agree for values to be ranked.
MEASURE = {
    "metric": "metric", "n": "n", "reference": "reference.content", "n of the reference": "reference.n",
    "image size": "image", "extractor": "extractor", "weights": "weights", "resize": "resize",
}  # fmt: skip
# These too, unless the comparison is about them.
GENERATION = {name: f"generation.{name}" for name in ("sampler", "evaluations", "guidance", "ema")}
# These are reported and left to the reader.
REPORTED = {
    "step": "generation.step", "effective batch": "generation.effective_batch", "versions": "versions",
    "sample seed": "generation.sample_seed", "train seed": "generation.train_seed",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A field in which cards differ, with its value for each evaluation."""

    field: str
    values: dict[str, str]

    def __str__(self) -> str:
        listed = ", ".join(f"{value} in {name}" for name, value in self.values.items())
        return f"{self.field} ({listed})"


@dataclass(frozen=True)
class Comparison:
    """Evaluations from best to worst, or the differences that rule out a ranking."""

    metric: str  # name of the metric that ranks
    ranking: tuple[str, ...]  # names of evaluations, best first; empty if there are differences
    differences: tuple[Difference, ...]  # in what must agree
    remarks: tuple[Difference, ...]  # in what the reader may judge
    overlapping: tuple[tuple[str, str], ...]  # neighbours in the ranking whose intervals overlap

    @property
    def comparable(self) -> bool:
        return not self.differences

    def require(self) -> None:
        """Raise an error that names the differences, if there are any."""
        if self.differences:
            listed = "; ".join(str(difference) for difference in self.differences)
            varied = [difference.field for difference in self.differences if difference.field in GENERATION]
            hint = f". If the comparison is about that, pass --vary {','.join(varied)}" if varied else ""
            raise EvaluationError(f"cannot rank these evaluations because their cards differ in {listed}{hint}")


def compare(evaluations: Mapping[str, Evaluation], vary: Collection[str] = (), metric: str | None = None) -> Comparison:
    """Rank evaluations by a metric, unless their cards differ in what it depends on.

    Metric, N, reference, extractor, weights, resize and image size must agree. So must sampler, evaluations per
    sample, guidance and EMA, except those named in `vary`. `metric` defaults to the first one of the evaluations.
    """
    if len(evaluations) < 2:
        raise EvaluationError(f"a comparison needs at least 2 evaluations, got {len(evaluations)}")
    for name in vary:
        if name in MEASURE:
            raise InvalidValueError(f"vary must name {', '.join(GENERATION)}, got {name!r}, which must always agree")
        if name not in GENERATION:
            raise unknown("field", name, GENERATION)
    names = [set(evaluation.values) for evaluation in evaluations.values()]
    metric = metric or next(iter(next(iter(evaluations.values())).values))
    cards = {name: evaluation.card for name, evaluation in evaluations.items()}
    required = {**MEASURE, **{name: path for name, path in GENERATION.items() if name not in vary}}
    differences = _differences(cards, required)
    remarks = _differences(cards, {**{name: GENERATION[name] for name in vary}, **REPORTED})
    if differences:
        return Comparison(metric, (), differences, remarks, ())
    if any(metric not in known for known in names):
        raise unknown("metric", metric, sorted(set.intersection(*names)))
    higher = metric in METRICS and METRICS[metric].higher_is_better
    ranking = tuple(sorted(evaluations, key=lambda name: evaluations[name].values[metric].value, reverse=higher))
    overlapping = tuple(
        pair for pair in pairwise(ranking) if _overlap(*(evaluations[name].values[metric].interval for name in pair))
    )
    return Comparison(metric, ranking, (), remarks, overlapping)


def _differences(cards: Mapping[str, Card], fields: Mapping[str, str]) -> tuple[Difference, ...]:
    values = {field: {name: attrgetter(path)(card) for name, card in cards.items()} for field, path in fields.items()}
    return tuple(
        Difference(field, {name: _shown(field, cards[name], value) for name, value in by_name.items()})
        for field, by_name in values.items()
        if any(value != next(iter(by_name.values())) for value in by_name.values())
    )


def _overlap(first: Any, second: Any) -> bool:
    return first is not None and second is not None and first.high >= second.low and second.high >= first.low


def _shown(field: str, card: Card, value: Any) -> str:
    """Return a field of a card as text, with names for hashes."""
    if field == "reference":
        return f"{card.reference.title} [{card.reference.content[:12]}]"
    if field == "weights":
        return str(value)[:12]
    if field == "image size":
        return "×".join(str(length) for length in value)
    if field == "versions":
        return ", ".join(f"{key} {version}" for key, version in sorted(value.items()))
    return f"{value:,}" if isinstance(value, int) else str(value)
