"""Streaming moments against NumPy, whatever the batches, and the sample of features that is kept."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.errors import EvaluationError, InvalidValueError
from scalelong.evaluation import FeatureAccumulator, Moments


def accumulate(features, sizes, **options):
    accumulator = FeatureAccumulator(**options)
    for part in features.split(sizes):
        accumulator.update(part)
    return accumulator


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(1, 6), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_moments_are_numpys_whatever_the_batch_size(n, width, size, seed):
    features = np.random.default_rng(seed).standard_normal((n, width)) * 5 + 100
    moments = accumulate(torch.from_numpy(features), size).result().moments
    assert moments.n == n
    np.testing.assert_allclose(moments.mean, features.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(moments.covariance, np.cov(features, rowvar=False).reshape(width, width), atol=1e-11)


def test_features_far_from_zero_lose_nothing_to_cancellation():
    """Σxxᵀ − n·x̄x̄ᵀ, the usual sums, would be off by about 1e8² · 1e-16 = 1 here."""
    small = torch.from_numpy(np.random.default_rng(0).standard_normal((1000, 4)))
    far = small + 1e8
    sums = far.T @ far - 1000 * torch.outer(far.mean(0), far.mean(0))
    exact = np.cov(small.numpy(), rowvar=False)
    ours = accumulate(far, 10).result().moments.covariance.numpy()
    assert np.abs(ours - exact).max() < 1e-6
    assert np.abs(sums.numpy() / 999 - exact).max() > 1e-3


def test_the_kept_features_depend_on_indices_only():
    features = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    one = accumulate(features, 17, keep=300).result().kept
    backwards = FeatureAccumulator(keep=300)
    for indices in torch.arange(5000).flip(0).split(1000):
        backwards.update(features[indices], indices)
    assert one.shape == (300, 3)
    assert torch.equal(one, backwards.result().kept)
    assert not torch.equal(one, accumulate(features, 17, keep=300, seed=1).result().kept)


def test_kept_features_are_a_uniform_sample():
    """Indices as features: the kept ones' mean is that of all, within four standard errors, for 20 seeds."""
    features = torch.arange(20_000.0)[:, None]
    error = 20_000 / np.sqrt(12) / np.sqrt(500)
    for seed in range(20):
        kept = accumulate(features, 5000, keep=500, seed=seed).result().kept
        assert len(kept.unique()) == 500
        assert abs(float(kept.mean()) - 9999.5) < 4 * error


def test_a_result_can_be_continued():
    features = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    whole = accumulate(features, 10, keep=30).result()
    continued = FeatureAccumulator.from_result(accumulate(features[:40], 10, keep=30).result(), keep=30)
    for start in range(40, 100, 10):
        continued.update(features[start : start + 10])
    again = continued.result()
    torch.testing.assert_close(again.moments.covariance, whole.moments.covariance, rtol=1e-13, atol=1e-13)
    assert torch.equal(again.kept, whole.kept)


def test_bad_features_are_named():
    accumulator = FeatureAccumulator()
    accumulator.update(torch.zeros(4, 3))
    broken = torch.zeros(3, 3)
    broken[1, 2] = float("nan")
    with pytest.raises(EvaluationError, match="image 5 .*NaN"):
        accumulator.update(broken)
    assert accumulator.count == 4
    with pytest.raises(EvaluationError, match="width 3, got width 2"):
        accumulator.update(torch.zeros(3, 2))
    with pytest.raises(EvaluationError, match="got 0"):
        FeatureAccumulator().result()


def test_moments_are_checked():
    with pytest.raises(InvalidValueError, match=r"\(3, 2\)"):
        Moments(5, torch.zeros(3), torch.zeros(3, 2))
    with pytest.raises(EvaluationError, match="NaN"):
        Moments(5, torch.zeros(3), torch.full((3, 3), float("nan")))
