"""The ranking of evaluations whose cards allow it, and the differences where they do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

from scalelong.errors import EvaluationError, unknown
from scalelong.evaluation.card import Card
from scalelong.evaluation.evaluate import Evaluation
from scalelong.evaluation.metrics import METRICS

Differences = dict[str, dict[str, str]]  # field of the cards → name of the evaluation → value

# Fields of a card by name. These must agree for values to be ranked.
MEASURE = {
    "metric": "metric", "n": "n", "reference": "reference.content", "n of the reference": "reference.n",
    "image size": "image", "extractor": "extractor", "weights": "weights", "resize": "resize",
}  # fmt: skip
# These too, unless the comparison is about them.
GENERATION = {
    name: f"generation.{name}"
    for name in ("sampler", "evaluations", "guidance", "ema", "clip_denoised", "labels", "autoencoder")
}
# These are reported and left to the reader.
REPORTED = {
    "step": "generation.step", "effective batch": "generation.effective_batch", "versions": "versions",
    "sample seed": "generation.sample_seed", "train seed": "generation.train_seed",
    "selection": "generation.selection", "minimum over": "generation.minimum_over",
    "objective": "generation.objective",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Evaluations from best to worst, or the differences that rule out a ranking."""

    metric: str  # name of the metric that ranks
    ranking: tuple[str, ...]  # names of evaluations, best first; empty if there are differences
    differences: Differences  # in what must agree
    remarks: Differences  # in what the reader may judge
    overlapping: tuple[tuple[str, str], ...]  # neighbours in the ranking whose intervals overlap

    @property
    def comparable(self) -> bool:
        return not self.differences

    def require(self) -> None:
        """Raise an error that names the differences, if there are any."""
        listed = []
        for field, values in self.differences.items():
            listed.append(f"{field} ({', '.join(f'{value} in {name}' for name, value in values.items())})")
        if listed:
            varied = ",".join(field for field in self.differences if field in GENERATION)
            hint = f". If the comparison is about that, pass --vary {varied}" if varied else ""
            raise EvaluationError(f"cannot rank evaluations whose cards differ in {'; '.join(listed)}{hint}")


def compare(evaluations: Mapping[str, Evaluation], vary: Collection[str] = (), metric: str | None = None) -> Comparison:
    """Rank evaluations by a metric, unless their cards differ in what it depends on.

    Metric, N, reference, extractor, weights, resize and image size must agree. So must sampler, evaluations per
    sample, guidance and EMA, except those named in `vary`. `metric` defaults to the first one of the evaluations.
    """
    if len(evaluations) < 2:
        raise EvaluationError(f"a comparison needs at least 2 evaluations, got {len(evaluations)}")
    for name in vary:
        if name not in GENERATION:
            raise unknown("field to vary", name, GENERATION)
    values = {name: evaluation.values for name, evaluation in evaluations.items()}
    metric = metric or next(iter(next(iter(values.values()))))
    cards = {name: evaluation.card for name, evaluation in evaluations.items()}
    fixed = {name: path for name, path in GENERATION.items() if name not in vary}
    measure = MEASURE
    if all(metric in card.metrics for card in cards.values()):  # its own extractor, not that of the first metric
        own = {field: f"{field}.{metric}" for field in ("extractor", "weights", "resize")}
        measure = {**{field: path for field, path in MEASURE.items() if field != "metric"}, **own}
    differences = _differences(cards, {**measure, **fixed})
    remarks = _differences(cards, {**{name: GENERATION[name] for name in vary}, **REPORTED})
    if differences:
        return Comparison(metric, (), differences, remarks, ())
    shared = set.intersection(*map(set, values.values()))
    if metric not in shared:
        raise unknown("metric", metric, sorted(shared))
    higher = metric in METRICS and METRICS[metric].higher_is_better
    ranking = sorted(values, key=lambda name: values[name][metric].value, reverse=higher)
    overlapping = []
    for pair in pairwise(ranking):
        first, second = (values[name][metric].interval for name in pair)
        if first and second and first.high >= second.low and second.high >= first.low:
            overlapping.append(pair)
    return Comparison(metric, tuple(ranking), {}, remarks, tuple(overlapping))


def _differences(cards: Mapping[str, Card], fields: Mapping[str, str]) -> Differences:
    differences = {}
    for field, path in fields.items():
        values = {name: _field(card, path) for name, card in cards.items()}
        first, *others = values.values()
        if any(value != first for value in others):
            differences[field] = {name: _shown(field, cards[name], value) for name, value in values.items()}
    return differences


def _field(card: Card, path: str) -> Any:
    """Return a field of a card, or "extractor.kid", a field of the entry of one metric."""
    name, _, metric = path.partition(".")
    return getattr(card.metrics[metric], name) if metric in card.metrics else attrgetter(path)(card)


def _shown(field: str, card: Card, value: Any) -> str:
    """Return a field of a card as text, with names for hashes."""
    if field == "reference":
        return f"{card.reference.title} [{value[:12]}]"
    if field == "weights":
        return str(value)[:12]
    if field == "image size":
        return "×".join(str(length) for length in value)
    if field == "versions":
        return ", ".join(f"{key} {version}" for key, version in sorted(value.items()))
    return f"{value:,}" if isinstance(value, int) else str(value)
