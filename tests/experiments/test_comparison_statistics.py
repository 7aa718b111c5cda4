"""Intervals and paired ratios against SciPy, their coverage, and accelerations of curves with a known factor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalelong.errors import InvalidValueError
from scalelong.experiments.statistics import (
    Estimate,
    acceleration,
    change,
    first_reached,
    mean_interval,
    paired_ratio,
    plus_minus,
    statistics_note,
)
from scalelong.runs.logs import Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20).filter(lambda v: np.std(v) > 1e-6)


@settings(deadline=None)
@given(values=VALUES)
def test_the_interval_is_scipys(values):
    estimate = mean_interval(values)
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert estimate.low == pytest.approx(low, rel=1e-9, abs=1e-6)
    assert estimate.high == pytest.approx(high, rel=1e-9, abs=1e-6)
    assert estimate.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-9)


def test_three_seeds_by_hand():
    estimate = mean_interval([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.high - estimate.mean == pytest.approx(
        4.302652729911275 * 1.0 / math.sqrt(3)
    )  # t_{0.975, 2} of any table


def test_one_seed_has_no_interval_and_the_note_says_so():
    estimate = mean_interval([0.5])
    assert (estimate.mean, estimate.low, estimate.high, estimate.n) == (0.5, None, None, 1)
    assert "no interval" in statistics_note(1)
    assert "Student" in statistics_note(3)
    assert "paired by seed" in statistics_note(3)


def test_a_paired_ratio_is_the_paired_t_interval_of_logarithms():
    random = np.random.default_rng(0)
    base = np.exp(random.normal(size=6))
    other = base * np.exp(random.normal(-0.1, 0.05, size=6))
    estimate = paired_ratio(dict(enumerate(other)), dict(enumerate(base)))
    reference = stats.ttest_rel(np.log(other), np.log(base)).confidence_interval(0.95)
    assert (math.log(estimate.low), math.log(estimate.high)) == pytest.approx((reference.low, reference.high))


def test_pairing_removes_what_seeds_share():
    """Seeds differ a lot, variants by exactly 5 %: unpaired means show nothing, paired ratios show 0.95."""
    base = {0: 1.0, 1: 2.0, 2: 5.0}
    estimate = paired_ratio({seed: 0.95 * value for seed, value in base.items()}, base)
    assert estimate.mean == pytest.approx(0.95)
    assert estimate.low == pytest.approx(0.95)
    assert estimate.high == pytest.approx(0.95)


def test_only_seeds_on_both_sides_count():
    estimate = paired_ratio({0: 2.0, 1: 8.0, 7: 100.0}, {0: 1.0, 1: 2.0, 9: 1.0})
    assert estimate.n == 2
    assert estimate.mean == pytest.approx(math.sqrt(2 * 4))
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_value_without_a_logarithm_has_no_ratio(bad):
    assert paired_ratio({0: bad}, {0: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: bad}) is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """4,000 comparisons of 3 seeds: 95 % ± 3 standard errors (0.0034 each)."""
    random = np.random.default_rng(1)
    draws = random.normal(0.1, 0.3, size=(4000, 3))
    intervals = [mean_interval(values) for values in draws.tolist()]
    covered = np.mean([interval.low <= 0.1 <= interval.high for interval in intervals])
    assert covered == pytest.approx(0.95, abs=0.0103)


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_a_mean_needs_finite_values(values):
    with pytest.raises(InvalidValueError):
        mean_interval(values)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Estimate(0.979, 0.97, 0.988, 3), "−2.1 % [−3.0, −1.2]"),
        (Estimate(1.05, None, None, 1), "+5.0 %"),
        (Estimate(0.31, 0.24, 0.4, 3), "×0.31 [0.24, 0.4]"),
        (Estimate(2.5, None, None, 1), "×2.5"),
        (Estimate(0.9, 0.035, 22.9, 2), "×0.9 [0.035, 22.9]"),
    ],
)
def test_a_ratio_reads_as_a_change_or_far_from_one_as_a_factor(ratio, text):
    assert change(ratio) == text


def test_a_mean_is_written_with_half_its_interval():
    assert plus_minus(Estimate(0.43215, 0.431, 0.4333, 3)) == "0.4321 ± 0.0012"
    assert plus_minus(Estimate(1234.5, None, None, 1)) == "1,234"


# ------------------------------------------------------------------------------------------------- acceleration


def series(steps, values):
    return Series(np.asarray(steps, float), np.asarray(values, float))


def falling(rate, every=100):
    steps = np.arange(every, 2001, every)
    return series(steps, np.exp(-rate * steps / 1000) + 0.2)


def test_a_crossing_lies_between_two_validations():
    assert first_reached(series([0, 100, 200], [1.0, 0.8, 0.4]), 0.5) == 175
    assert first_reached(series([100, 200], [0.3, 0.2]), 0.5) == 100  # from the start
    assert first_reached(series([100, 200], [0.9, 0.8]), 0.5) is None
    assert first_reached(series([0, 100, 200], [1.0, np.nan, 0.0]), 0.5) == 100  # NaN is not a validation


def test_twice_the_rate_gives_a_factor_of_two():
    sooner = acceleration({0: falling(2.0, every=10)}, {0: falling(1.0, every=10)})
    assert sooner.factor.mean == pytest.approx(2.0, rel=1e-3)
    assert sooner.factor.low is None  # one seed


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=40))
def test_equal_curves_give_exactly_one_however_noisy(values):
    """A noisy curve touches its final value early; counting the baseline's whole length would call it faster."""
    curve = series(range(1, len(values) + 1), values)
    sooner = acceleration({0: curve, 1: curve}, {0: curve, 1: curve})
    assert sooner.factor.mean == pytest.approx(1.0)
    assert sooner.reached == 2


def test_the_interval_is_over_seeds():
    curves = {seed: falling(rate) for seed, rate in enumerate((1.4, 1.5, 1.6))}
    sooner = acceleration(curves, {seed: falling(1.0) for seed in range(3)})
    assert sooner.factor.low < 1.5 < sooner.factor.high
    assert sooner.factor.n == 3


def test_a_seed_that_never_reaches_the_value_leaves_no_factor_but_a_bound():
    sooner = acceleration({0: falling(2.0), 1: falling(0.5)}, {0: falling(1.0), 1: falling(1.0)})
    assert sooner.factor is None
    assert sooner.reached == 1
    assert sooner.at_most == pytest.approx(1.0)  # it would reach the value right after its last step
    assert sooner.steps[1] is None


def test_one_measurement_does_not_say_when_a_value_was_reached():
    one, two = Series(np.array([20.0]), np.array([0.4])), Series(np.array([10.0, 20.0]), np.array([0.5, 0.4]))
    assert acceleration({0: one}, {0: one}) is None
    assert acceleration({0: one}, {0: two}) is None


def test_without_a_common_seed_or_a_validation_there_is_no_factor():
    assert acceleration({0: falling(1)}, {1: falling(1)}) is None
    assert acceleration({0: series([], [])}, {0: falling(1)}) is None
