"""Thinned curves keep what matters."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.report.thin import thin
from scalelong.runs.logs import Series


def series(values):
    return Series(np.arange(1, len(values) + 1, dtype=float), np.asarray(values, float))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_infinity=True, allow_nan=True, width=32), max_size=500), st.integers(1, 60))
def test_never_more_points_than_asked_and_extremes_survive(values, points):
    found = thin(series(values), points)
    finite = [v for v in values if np.isfinite(v)]
    if not finite:
        assert found is None
        return
    assert len(found["x"]) <= points
    assert np.isclose(max(found.get("high", found["y"])), max(finite), rtol=1e-4, atol=1e-30)
    assert np.isclose(min(found.get("low", found["y"])), min(finite), rtol=1e-4, atol=1e-30)


def test_one_spike_in_a_million_is_seen():
    values = np.ones(1_000_000)
    values[123_456] = 50.0
    found = thin(series(values))
    assert max(found["high"]) == 50
    assert len(found["x"]) == 300
    assert (found["x"][0], found["x"][-1]) == (1, 1_000_000)  # steps are not rounded away


def test_buckets_are_means():
    found = thin(series([0, 2, 4, 6]), 2)
    assert found["y"] == [1, 5]
    assert found["low"] == [0, 4]
    assert found["high"] == [2, 6]


def test_a_short_curve_is_given_as_it_is():
    assert thin(series([3.0, float("nan"), 1.0])) == {"x": [1, 3], "y": [3, 1]}
