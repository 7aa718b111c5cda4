"""The acceleration factor on curves whose factor is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.experiments.acceleration import acceleration, first_reached
from scalelong.runs.logs import Series


def series(steps, values):
    return Series(np.asarray(steps, float), np.asarray(values, float))


def falling(rate, every=100):
    steps = np.arange(every, 2001, every)
    return series(steps, np.exp(-rate * steps / 1000) + 0.2)


def test_a_crossing_lies_between_two_validations():
    assert first_reached(series([0, 100, 200], [1.0, 0.8, 0.4]), 0.5) == 175
    assert first_reached(series([100, 200], [0.3, 0.2]), 0.5) == 100  # there from the start
    assert first_reached(series([100, 200], [0.9, 0.8]), 0.5) is None
    assert first_reached(series([0, 100, 200], [1.0, np.nan, 0.0]), 0.5) == 100  # NaN is no validation


def test_twice_the_rate_is_twice_as_soon():
    found = acceleration({0: falling(2.0, every=10)}, {0: falling(1.0, every=10)})
    assert found.factor.mean == pytest.approx(2.0, rel=1e-3)
    assert found.factor.low is None  # one seed


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=40))
def test_equal_curves_give_exactly_one_however_noisy(values):
    """A noisy curve touches its final value early; counting the baseline's whole length would call that faster."""
    curve = series(range(1, len(values) + 1), values)
    found = acceleration({0: curve, 1: curve}, {0: curve, 1: curve})
    assert found.factor.mean == pytest.approx(1.0)
    assert found.reached == 2


def test_the_interval_is_over_seeds():
    curves = {seed: falling(rate) for seed, rate in enumerate((1.4, 1.5, 1.6))}
    found = acceleration(curves, {seed: falling(1.0) for seed in range(3)})
    assert found.factor.low < 1.5 < found.factor.high
    assert found.factor.n == 3


def test_a_seed_that_never_gets_there_leaves_no_factor_and_a_bound():
    found = acceleration({0: falling(2.0), 1: falling(0.5)}, {0: falling(1.0), 1: falling(1.0)})
    assert found.factor is None
    assert found.reached == 1
    assert found.at_most == pytest.approx(1.0)  # had it arrived right after its last step
    assert found.steps[1] is None


def test_no_common_seed_or_no_validation_is_no_figure():
    assert acceleration({0: falling(1)}, {1: falling(1)}) is None
    assert acceleration({0: series([], [])}, {0: falling(1)}) is None
