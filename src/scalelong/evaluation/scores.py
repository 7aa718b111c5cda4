"""Metrics of samples alone: the Inception score, and the CLIP score of images with their captions."""

import torch
from torch import Tensor

from scalelong.errors import EvaluationError
from scalelong.evaluation.statistics import FeatureSet
from scalelong.evaluation.values import MetricValue, bootstrap

SPLITS = 10


def inception_score(features: Tensor, head: Tensor, splits: int = SPLITS) -> tuple[float, float, Tensor]:
    """Return IS = exp E KL(p(y|x) ‖ p(y)) as the mean over splits, its spread over them, and the influence (n,).

    features: (n, 2048); head: (1008, 2048), the classifier without its bias, as in the published score.
    To first order, one more image like x moves log IS by KL(p(y|x) ‖ p(y)) minus its mean.
    """
    scores, influence = [], []
    for part in features.tensor_split(splits):
        log_p = (part.double() @ head.double().T).log_softmax(dim=1)  # (b, 1008)
        divergence = (log_p.exp() * (log_p - log_p.logsumexp(dim=0) + torch.tensor(float(len(part))).log())).sum(dim=1)
        scores.append(divergence.mean().exp())
        influence.append(scores[-1] * (divergence - divergence.mean()))
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0)), torch.cat(influence)


def inception(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """The Inception score (Salimans et al., 2016) over 10 splits. The reference has no part in it."""
    assert samples.kept is not None
    assert samples.head is not None
    if len((samples.kept @ samples.head.T).argmax(dim=1).unique()) == 1:
        raise EvaluationError("the Inception score needs images of several classes, got a single class for all of them")
    value, spread, influence = inception_score(samples.kept, samples.head)
    n = len(samples.kept)
    around = bootstrap(value, influence, n, seed=seed) if interval else None
    return MetricValue(value, around, {"n": n, "splits": SPLITS, "spread_over_splits": spread})


def clip_score(samples: FeatureSet, reference: FeatureSet, interval: bool, seed: int) -> MetricValue:
    """The mean of max(0, 100·cos) between each image and its caption (Hessel et al., 2021; torchmetrics' scale)."""
    assert samples.kept is not None
    assert samples.text is not None
    scores = 100 * (samples.kept.double() * samples.text.double()).sum(dim=1).clamp(min=0)
    value, n = float(scores.mean()), len(scores)
    return MetricValue(value, bootstrap(value, scores, n, seed=seed) if interval else None, {"n": n})
