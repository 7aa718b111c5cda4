"""Neighbours, MIND, Inception score, CMMD and CLIP score against torch-fidelity, naive loops and closed forms."""

import numpy as np
import pytest
import torch
from fidelity_peer import fidelity_metric

from scalelong.errors import EvaluationError
from scalelong.evaluation import METRICS, FeatureSet, Moments
from scalelong.evaluation import neighbours as neighbours_module
from scalelong.evaluation.scores import inception_score
from scalelong.evaluation.sliced import sliced_distance


def draw(n, width=16, shift=0.0, seed=0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) + shift


def features(x, **aids):
    return FeatureSet(Moments(len(x), x.double().mean(0), x.double().T.cov()), x, **aids)


def value(name, x, y, **aids):
    return METRICS[name].compute(features(x, **aids), features(y), True, 0)


def naive_balls(x, y, k):
    """Distances (m, n) and the radius of every ball of y, by NumPy loops."""
    x, y = x.double().numpy(), y.double().numpy()
    distance = np.array([[np.linalg.norm(a - b) for b in y] for a in x])
    radius = np.array([np.sort([np.linalg.norm(a - b) for b in y])[k] for a in y])
    return distance, radius


@pytest.fixture
def sets(monkeypatch):
    monkeypatch.setattr(neighbours_module, "ROWS", 7)  # several blocks
    return draw(40, shift=0.3), draw(50, seed=1)


def test_precision_and_recall_are_the_definitions(sets):
    x, y = sets
    distance, radius = naive_balls(x, y, 3)
    assert value("precision", x, y).value == pytest.approx((distance <= radius).any(axis=1).mean())
    distance, radius = naive_balls(y, x, 3)
    assert value("recall", x, y).value == pytest.approx((distance <= radius).any(axis=1).mean())


def test_density_and_coverage_are_the_definitions(sets):
    x, y = sets
    distance, radius = naive_balls(x, y, 5)
    inside = distance <= radius
    assert value("density", x, y).value == pytest.approx(inside.sum() / (5 * len(x)))
    assert value("coverage", x, y).value == pytest.approx(inside.any(axis=0).mean())


def test_precision_and_recall_equal_torch_fidelitys(sets):
    x, y = sets
    theirs = fidelity_metric("prc").calculate_precision_recall_full(x, y)
    assert (value("precision", x, y).value, value("recall", x, y).value) == pytest.approx(theirs)


@pytest.mark.parametrize("name", ["recall", "coverage"])
def test_the_influence_of_a_sample_is_what_leaving_it_out_changes(name, sets):
    # Exact for coverage. For recall the balls of the other samples grow a little, which the influence leaves out.
    x, y = draw(60, 3, shift=0.8), draw(70, 3, seed=1)  # far from 0 and 1, where the interval is cut
    whole = value(name, x, y)
    left_out = [whole.value - value(name, torch.cat([x[:k], x[k + 1 :]]), y).value for k in range(len(x))]
    spread = np.std(left_out) * len(x) / len(x) ** 0.5  # the jackknife's standard error
    width = (whole.interval.high - whole.interval.low) / (2 * 1.96)
    assert width == pytest.approx(spread, rel=0.15 if name == "coverage" else 0.5)


@pytest.mark.parametrize("name", ["precision", "recall", "density", "coverage"])
def test_extremes(name):
    x = draw(30)
    assert value(name, x, x).value == pytest.approx(1.0, abs=0.2)  # the same set; density is 1 + 1/k there
    assert value(name, x + 100, x).value == 0.0
    if name != "density":
        assert value(name, x, x).interval.high <= 1.0


@pytest.mark.parametrize(("name", "k"), [("precision", 3), ("recall", 3), ("density", 5), ("coverage", 5)])
def test_too_few_images_for_k_are_refused(name, k):
    with pytest.raises(EvaluationError, match=f"{k}-th nearest neighbour needs at least {k + 1} images, got {k}"):
        value(name, draw(k), draw(k, seed=1))


def test_mind_of_a_shift_is_three_times_its_square():
    """A shift by δ moves every projection by ⟨δ, u⟩, whose mean square over directions is ‖δ‖²/D."""
    x = draw(50, 8)
    delta = torch.linspace(0, 1, 8)
    distance = sliced_distance(x + delta, x, projections=20_000)
    assert distance.value == pytest.approx(3 * float(delta.square().sum()), rel=0.03)


def test_mind_is_scipys_wasserstein_distance_in_one_dimension():
    x, y = draw(40, 1).abs(), draw(40, 1, 0.5, seed=1)
    expected = 3 * float((x[:, 0].sort().values - y[:, 0].sort().values).square().mean())
    assert sliced_distance(x, y, projections=3).value == pytest.approx(expected, rel=1e-5)
    assert sliced_distance(x, x).value == 0.0


def test_the_interval_of_mind_has_the_spread_of_fresh_draws():
    reference = draw(400, 6, seed=99)
    fresh = [sliced_distance(draw(400, 6, 0.5, seed=k), reference, 50).value for k in range(40)]
    result = value("mind", draw(400, 6, 0.5, seed=0), reference)
    width = (result.interval.high - result.interval.low) / (2 * 1.96)
    assert width == pytest.approx(np.std(fresh), rel=0.35)  # the standard error of a spread over 40 draws is 11 %
    assert result.details == {"n": 400, "projections": 1000}


def test_the_inception_score_equals_torch_fidelitys():
    x, head = draw(200, 32), draw(20, 32, seed=3)
    score, spread, influence = inception_score(x, head)
    theirs = fidelity_metric("isc").isc_features_to_metric(x @ head.T, shuffle=False)
    assert (score, spread) == pytest.approx(tuple(theirs.values()), rel=1e-5)
    assert influence.shape == (200,)
    result = value("is", x, x, head=head)
    assert result.interval.low < result.value < result.interval.high


def test_the_inception_score_of_a_single_class_is_refused():
    head = torch.zeros(5, 16)
    head[2] = 1.0
    with pytest.raises(EvaluationError, match="single class"):
        value("is", draw(20).abs() + 1, draw(20), head=head)


def test_cmmd_is_the_mean_of_the_gaussian_kernel():
    x, y = (torch.nn.functional.normalize(draw(n, 8, 0.5 * k, seed=k), dim=1) for k, n in enumerate((30, 25)))
    kernel = lambda a, b: torch.exp(-torch.cdist(a.double(), b.double()).square() / (2 * 10**2))
    expected = 1000 * (kernel(x, x).mean() + kernel(y, y).mean() - 2 * kernel(x, y).mean())
    result = value("cmmd", x, y)
    assert result.value == pytest.approx(float(expected), rel=1e-9)
    assert result.details["unbiased"] < result.value
    assert result.interval.low < result.value < result.interval.high


def test_the_clip_score_is_the_mean_cosine():
    x, text = (torch.nn.functional.normalize(draw(30, 8, 0.3, seed=k), dim=1) for k in (0, 1))
    expected = 100 * torch.nn.functional.cosine_similarity(x, text).clamp(min=0).mean()
    assert value("clip-score", x, x, text=text).value == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_every_shared_metric_agrees_with_torch_fidelity_on_the_same_features():
    """Features like Inception's: not negative, with N above their width."""
    x, y = (draw(1200, 512, shift, seed).relu() for seed, shift in ((0, 0.1), (1, 0.0)))
    fid = fidelity_metric("fid")
    statistics = [fid.fid_features_to_statistics(side) for side in (x, y)]
    theirs = fid.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert value("fid", x, y).value == pytest.approx(theirs, rel=1e-5)
    kernels = [(a.double() @ b.double().T / 512 + 1).pow(3).numpy() for a, b in ((x, x), (x, y), (y, y))]
    assert value("kid", x, y).value == pytest.approx(fidelity_metric("kid").mmd2(*kernels), rel=1e-6)
    prc = fidelity_metric("prc").calculate_precision_recall_full(x, y)
    assert (value("precision", x, y).value, value("recall", x, y).value) == pytest.approx(prc, abs=1e-3)
    head = draw(1008, 512, seed=2) * 0.1
    score = fidelity_metric("isc").isc_features_to_metric(x @ head.T, shuffle=False)["inception_score_mean"]
    assert value("is", x, y, head=head).value == pytest.approx(score, rel=1e-4)
