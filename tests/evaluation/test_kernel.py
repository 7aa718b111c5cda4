"""KID against a naive double loop, torchmetrics and simulation."""

import numpy as np
import pytest
import torch
from fidelity_peer import torchmetrics_image
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong import ScaleLongError
from scalelong.evaluation import kernel as kernel_module
from scalelong.evaluation import kernel_distance
from scalelong.evaluation.interval import bootstrap


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
    found = kernel_distance(torch.from_numpy(x), torch.from_numpy(y))
    assert found.value == pytest.approx(double_loop(x, y), rel=1e-9, abs=1e-12)


def test_blocks_leave_no_pair_out(monkeypatch):
    monkeypatch.setattr(kernel_module, "BLOCK", 4)
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (13, 10))
    assert kernel_distance(x, y).value == pytest.approx(double_loop(x.numpy(), y.numpy()), rel=1e-9)


def test_spread_is_the_deviation_of_kid_over_disjoint_subsets():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(45, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    found = kernel_distance(x, y, subset_size=11)
    parts = [double_loop(x[k : k + 11].numpy(), y[k : k + 11].numpy()) for k in range(0, 44, 11)]
    assert found.subsets == 4
    assert found.spread == pytest.approx(float(np.std(parts, ddof=1)), rel=1e-9)


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


def test_interval_has_the_width_of_the_true_sampling_spread():
    """The reference fixed and the images drawn anew, 150 times."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(300, 8, generator=generator) + 0.3
    found = [kernel_distance(torch.randn(150, 8, generator=generator), reference) for _ in range(150)]
    truth = float(np.std([kid.value for kid in found]))
    intervals = [bootstrap(kid.value, kid.influence, 150, replicates=300) for kid in found[:40]]
    spread = float(np.mean([(interval.high - interval.low) / (2 * 1.96) for interval in intervals]))
    assert 0.75 < spread / truth < 1.25


def test_too_few_images_and_other_widths_are_refused():
    with pytest.raises(ScaleLongError, match="at least 4 images"):
        kernel_distance(torch.randn(3, 2), torch.randn(9, 2))
    with pytest.raises(ScaleLongError, match="widths 2 and 3"):
        kernel_distance(torch.randn(9, 2), torch.randn(9, 3))
    with pytest.raises(ScaleLongError, match="subset_size is 10"):
        kernel_distance(torch.randn(9, 2), torch.randn(9, 2), subset_size=10)
