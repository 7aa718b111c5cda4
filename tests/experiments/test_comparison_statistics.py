"""Intervals and paired ratios against SciPy, and what they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalelong.errors import ScaleLongError
from scalelong.experiments.statistics import mean_interval, paired_ratio, statement, t_quantile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20).filter(lambda v: np.std(v) > 1e-6)


@settings(deadline=None)
@given(values=VALUES, confidence=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_scipys(values, confidence):
    found = mean_interval(values, confidence)
    low, high = stats.t.interval(confidence, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert found.low == pytest.approx(low, rel=1e-9, abs=1e-6)
    assert found.high == pytest.approx(high, rel=1e-9, abs=1e-6)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-9)


def test_three_seeds_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(4.302652729911275 * 1.0 / math.sqrt(3))  # t_{0.975, 2} of any table


def test_one_seed_has_no_interval_and_says_so():
    found = mean_interval([0.5])
    assert (found.mean, found.low, found.high, found.n) == (0.5, None, None, 1)
    assert "no interval" in statement(1)
    assert "Student" in statement(3)
    assert "paired by seed" in statement(3)


def test_a_paired_ratio_is_the_paired_t_interval_of_logarithms():
    random = np.random.default_rng(0)
    base = np.exp(random.normal(size=6))
    other = base * np.exp(random.normal(-0.1, 0.05, size=6))
    found = paired_ratio(dict(enumerate(other)), dict(enumerate(base)))
    reference = stats.ttest_rel(np.log(other), np.log(base)).confidence_interval(0.95)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((reference.low, reference.high))


def test_pairing_takes_out_what_seeds_share():
    """Seeds differ a lot, variants by exactly 5 %: unpaired means would see nothing, paired ratios see 0.95."""
    base = {0: 1.0, 1: 2.0, 2: 5.0}
    found = paired_ratio({seed: 0.95 * value for seed, value in base.items()}, base)
    assert found.mean == pytest.approx(0.95)
    assert found.low == pytest.approx(0.95)
    assert found.high == pytest.approx(0.95)


def test_only_seeds_that_both_have_count():
    found = paired_ratio({0: 2.0, 1: 8.0, 7: 100.0}, {0: 1.0, 1: 2.0, 9: 1.0})
    assert found.n == 2
    assert found.mean == pytest.approx(math.sqrt(2 * 4))
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_has_no_logarithm_has_no_ratio(bad):
    assert paired_ratio({0: bad}, {0: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: bad}) is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """4,000 comparisons of 3 seeds: 95 % ± 3 standard errors (0.0034 each)."""
    random = np.random.default_rng(1)
    draws = random.normal(0.1, 0.3, size=(4000, 3))
    half = t_quantile(0.975, 2) * draws.std(1, ddof=1) / math.sqrt(3)
    covered = np.mean(np.abs(draws.mean(1) - 0.1) <= half)
    assert covered == pytest.approx(0.95, abs=0.0103)


@pytest.mark.parametrize(("values", "word"), [([], "at least one"), ([1.0, math.nan], "not finite")])
def test_bad_values_get_a_sentence(values, word):
    with pytest.raises(ScaleLongError, match=word):
        mean_interval(values)
