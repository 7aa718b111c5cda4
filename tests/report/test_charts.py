"""Thinned curves keep their spikes and their ends."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.report.charts import rounded, thin
from scalelong.runs.logs import Series


def series(values):
    return Series(np.arange(1, len(values) + 1, dtype=float), np.asarray(values, float))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_infinity=True, allow_nan=True, width=32), max_size=500), st.integers(1, 60))
def test_thinning_keeps_the_number_of_points_and_the_extremes(values, points):
    thinned = thin(series(values), points)
    finite = [v for v in values if np.isfinite(v)]
    if not finite:
        assert thinned is None
        return
    assert len(thinned["x"]) <= points
    assert np.isclose(max(thinned.get("high", thinned["y"])), max(finite), rtol=1e-4, atol=1e-30)
    assert np.isclose(min(thinned.get("low", thinned["y"])), min(finite), rtol=1e-4, atol=1e-30)


def test_one_spike_in_a_million_survives():
    values = np.ones(1_000_000)
    values[123_456] = 50.0
    thinned = thin(series(values))
    assert max(thinned["high"]) == 50
    assert len(thinned["x"]) == 300
    assert (thinned["x"][0], thinned["x"][-1]) == (1, 1_000_000)  # steps are not rounded away


def test_buckets_have_mean_minimum_and_maximum():
    thinned = thin(series([0, 2, 4, 6]), 2)
    assert thinned["y"] == [1, 5]
    assert thinned["low"] == [0, 4]
    assert thinned["high"] == [2, 6]


def test_a_short_curve_stays_as_it_is():
    assert thin(series([3.0, float("nan"), 1.0])) == {"x": [1, 3], "y": [3, 1]}


def test_numbers_for_the_page_are_short_and_finite():
    assert rounded([1.23456789, 3.0, float("nan"), float("inf"), 1e300]) == [1.2346, 3, None, None, 1e300]
