"""Metrics against closed forms, SciPy, naive loops, torchmetrics and simulation."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from fidelity_peer import torchmetrics_image
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.errors import EvaluationError, InvalidValueError
from scalelong.evaluation import FeatureAccumulator, Moments, frechet_distance, kernel_distance
from scalelong.evaluation import kernel as kernel_module
from scalelong.evaluation.metrics import bootstrap

F64 = torch.float64


def moments(features):
    accumulator = FeatureAccumulator()
    accumulator.update(features)
    return accumulator.result().moments


def random_covariance(width, rank, generator):
    factor = torch.randn(width, rank, dtype=F64, generator=generator)
    return factor @ factor.T / rank


def test_one_dimension_is_the_closed_form():
    """(μ₁ − μ₂)² + (σ₁ − σ₂)²."""
    first = Moments(10, torch.tensor([1.0], dtype=F64), torch.tensor([[4.0]], dtype=F64))
    second = Moments(10, torch.tensor([-0.5], dtype=F64), torch.tensor([[9.0]], dtype=F64))
    distance = frechet_distance(first, second)
    assert distance.value == pytest.approx(1.5**2 + 1.0**2, abs=1e-12)
    assert (distance.mean_part, distance.covariance_part) == (pytest.approx(2.25), pytest.approx(1.0))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_covariances_that_commute_have_the_closed_form(width, seed):
    """With a common basis: ‖μ₁ − μ₂‖² + Σ (√λ₁ − √λ₂)²."""
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.standard_normal((width, width)))
    one, two = random.uniform(0, 3, width), random.uniform(0, 3, width)
    mean = random.standard_normal(width)
    first = Moments(None, torch.zeros(width, dtype=F64), torch.from_numpy(basis * one @ basis.T))
    second = Moments(None, torch.from_numpy(mean), torch.from_numpy(basis * two @ basis.T))
    expected = (mean**2).sum() + ((np.sqrt(one) - np.sqrt(two)) ** 2).sum()
    assert frechet_distance(first, second).value == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("width", [3, 64, 200])
def test_well_conditioned_matrices_agree_with_scipy(width):
    generator = torch.Generator().manual_seed(width)
    one, two = (random_covariance(width, 4 * width, generator) for _ in range(2))
    zero = torch.zeros(width, dtype=F64)
    root = scipy.linalg.sqrtm((one @ two).numpy())
    expected = float(one.trace() + two.trace()) - 2 * np.trace(root).real
    assert frechet_distance(Moments(None, zero, one), Moments(None, zero, two)).value == pytest.approx(
        expected, rel=1e-9
    )


def test_rank_deficient_covariances_have_their_exact_distance():
    """Gaussians on orthogonal subspaces have tr(Σ₁^½ Σ₂ Σ₁^½)^½ = 0, and the distance is the sum of the traces.

    The eigenvalues of the asymmetric product, which torchmetrics takes, are then rounding and nothing else.
    """
    width, generator = 200, torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(width, width, dtype=F64, generator=generator))
    scale = torch.linspace(1, 30, 50, dtype=F64)
    one = (basis[:, :50] * scale) @ basis[:, :50].T
    two = (basis[:, 50:100] * scale) @ basis[:, 50:100].T
    zero = torch.zeros(width, dtype=F64)
    distance = frechet_distance(Moments(None, zero, one), Moments(None, zero, two))
    expected = 2 * float(scale.sum())
    assert abs(distance.value - expected) < 1e-10
    assert distance.rank == distance.rank_reference == 50
    product = torch.linalg.eigvals(one @ two).sqrt().real.sum()  # torchmetrics' way, in its recommended float64
    assert float(product) > 1e-6


def test_fewer_images_than_features_is_finite_and_symmetric():
    generator = torch.Generator().manual_seed(1)
    one, two = (moments(torch.randn(20, 100, generator=generator)) for _ in range(2))
    there, back = frechet_distance(one, two), frechet_distance(two, one)
    assert there.rank == 19
    assert math.isfinite(there.value)
    assert there.value == pytest.approx(back.value, rel=1e-9)


def test_distance_to_itself_is_zero():
    one = moments(torch.randn(30, 100, generator=torch.Generator().manual_seed(2)) * 10 + 50)
    assert frechet_distance(one, one).value < 1e-9


def test_agrees_with_torchmetrics_on_full_rank_features():
    fid = torchmetrics_image("fid")
    generator = torch.Generator().manual_seed(3)
    one, two = torch.randn(400, 16, generator=generator), torch.randn(300, 16, generator=generator) * 1.3 + 0.2

    class AsIs(torch.nn.Module):
        num_features = 16

        def forward(self, x):
            return x

    metric = fid.FrechetInceptionDistance(AsIs()).set_dtype(torch.float64)
    metric.update(one.double(), real=True)
    metric.update(two.double(), real=False)
    assert frechet_distance(moments(one), moments(two)).value == pytest.approx(float(metric.compute()), rel=1e-9)


def test_different_widths_are_refused():
    with pytest.raises(EvaluationError, match="3 and 4"):
        frechet_distance(moments(torch.randn(9, 3)), moments(torch.randn(9, 4)))


def test_influence_is_the_derivative():
    """Counting an image in once more with weight w moves d² by w·ψ to first order (finite differences)."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(200, 6, dtype=F64, generator=generator) * 2
    target = moments(torch.randn(200, 6, dtype=F64, generator=generator))

    def distance(weights):
        weights = weights / weights.sum()
        mean = weights @ features
        covariance = (features - mean).T @ ((features - mean) * weights[:, None])
        return frechet_distance(Moments(None, mean, covariance), target)

    uniform = torch.full((200,), 1 / 200, dtype=F64)
    influence = distance(uniform).influence(features)
    step = 1e-6
    for image in (0, 17, 199):
        towards = (1 - step) * uniform
        towards[image] += step
        away = (1 + step) * uniform
        away[image] -= step
        slope = (distance(towards).value - distance(away).value) / (2 * step)
        assert float(influence[image]) == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_frechet_interval_has_the_width_of_the_true_sampling_spread():
    """N / D = 5, as 10,000 images have for Inception: the linearised bootstrap is within a quarter of the truth."""
    generator = torch.Generator().manual_seed(5)
    width, n = 40, 200
    scale = torch.arange(1, width + 1, dtype=F64) ** -0.5

    def draw(count):
        return torch.randn(count, width, dtype=F64, generator=generator) * scale

    target = moments(draw(1000) * 1.2 + 0.1)
    samples = [draw(n) for _ in range(200)]
    distances = [frechet_distance(moments(sample), target) for sample in samples]
    truth = float(np.std([distance.value for distance in distances]))
    intervals = [
        bootstrap(distance.value, distance.influence(sample), n, replicates=400)
        for distance, sample in zip(distances[:40], samples[:40], strict=True)
    ]
    spread = float(np.mean([(interval.high - interval.low) / (2 * 1.96) for interval in intervals]))
    assert 0.75 < spread / truth < 1.25


def test_interval_contains_the_value_and_narrows_as_the_root_of_n():
    psi = torch.randn(500, generator=torch.Generator().manual_seed(6), dtype=F64)
    few, many = (bootstrap(3.0, psi, n, seed=1) for n in (500, 50_000))
    assert few.low < 3.0 < few.high
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.1)
    assert (few.high - few.low) / 2 == pytest.approx(1.96 * float(psi.std()) / math.sqrt(500), rel=0.1)


# ------------------------------------------------------------------------------------------------ KID


def double_loop(x, y):
    """The unbiased estimator as Bińkowski et al. print it (their Eq. 4), one pair at a time."""

    def k(a, b):
        return (float(a @ b) / len(a) + 1) ** 3

    m, n = len(x), len(y)
    within = sum(k(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    beside = sum(k(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    across = sum(k(a, b) for a in x for b in y) / (m * n)
    return within + beside - 2 * across


@settings(max_examples=15, deadline=None)
@given(st.integers(4, 25), st.integers(4, 25), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_kid_is_the_double_loop(m, n, width, seed):
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((m, width)), random.standard_normal((n, width)) + 0.5
    result = kernel_distance(torch.from_numpy(x), torch.from_numpy(y))
    assert result.value == pytest.approx(double_loop(x, y), rel=1e-9, abs=1e-12)


def test_blocks_leave_no_pair_out(monkeypatch):
    monkeypatch.setattr(kernel_module, "BLOCK", 4)
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (13, 10))
    assert kernel_distance(x, y).value == pytest.approx(double_loop(x.numpy(), y.numpy()), rel=1e-9)


def test_spread_is_the_deviation_of_kid_over_disjoint_subsets():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(45, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    result = kernel_distance(x, y, subset_size=11)
    parts = [double_loop(x[k : k + 11].numpy(), y[k : k + 11].numpy()) for k in range(0, 44, 11)]
    assert result.subsets == 4
    assert result.spread == pytest.approx(float(np.std(parts, ddof=1)), rel=1e-9)


def test_a_set_against_itself_is_judged_like_an_equal_copy():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    same, copy = kernel_distance(x, x), kernel_distance(x, x.clone())
    assert same.value == pytest.approx(copy.value, rel=1e-9)
    assert same.with_diagonal == pytest.approx(0.0, abs=1e-12)


def test_a_subset_agrees_with_torchmetrics():
    kid = torchmetrics_image("kid")
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(60, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    assert kernel_distance(x, y).value == pytest.approx(float(kid.poly_mmd(y, x)), rel=1e-9)


def test_kid_of_the_same_distribution_is_zero_on_average():
    """Unbiased: the mean over many draws is within three standard errors of 0, and some draws are negative."""
    generator = torch.Generator().manual_seed(2)
    draws = [
        kernel_distance(torch.randn(30, 8, generator=generator), torch.randn(30, 8, generator=generator)).value
        for _ in range(200)
    ]
    assert min(draws) < 0
    assert abs(np.mean(draws)) < 3 * np.std(draws) / np.sqrt(len(draws))


def test_kid_interval_has_the_width_of_the_true_sampling_spread():
    """The reference fixed and the images drawn anew, 150 times."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(300, 8, generator=generator) + 0.3
    result = [kernel_distance(torch.randn(150, 8, generator=generator), reference) for _ in range(150)]
    truth = float(np.std([kid.value for kid in result]))
    intervals = [bootstrap(kid.value, kid.influence, 150, replicates=300) for kid in result[:40]]
    spread = float(np.mean([(interval.high - interval.low) / (2 * 1.96) for interval in intervals]))
    assert 0.75 < spread / truth < 1.25


def test_too_few_images_and_other_widths_are_refused():
    with pytest.raises(EvaluationError, match="4 images.*got 3"):
        kernel_distance(torch.randn(3, 2), torch.randn(9, 2))
    with pytest.raises(EvaluationError, match="2 and 3"):
        kernel_distance(torch.randn(9, 2), torch.randn(9, 3))
    with pytest.raises(InvalidValueError, match="subset_size.*10"):
        kernel_distance(torch.randn(9, 2), torch.randn(9, 2), subset_size=10)
