"""Least-squares lines and R² against scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalelong.errors import InvalidValueError
from scalelong.theory.fits import exponent, fit_line, r_squared

points = st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=3, max_size=20)


@given(points)
def test_the_line_equals_scipys(pairs):
    x, y = zip(*pairs, strict=True)
    if max(x) - min(x) < 1e-2 or max(y) - min(y) < 1e-2:
        return
    expected = stats.linregress(x, y)
    line = fit_line(x, y)
    assert line.slope == pytest.approx(expected.slope, abs=1e-6, rel=1e-6)
    assert line.intercept == pytest.approx(expected.intercept, abs=1e-6, rel=1e-6)
    assert line.r_squared == pytest.approx(expected.rvalue**2, abs=1e-6)


def test_r_squared_of_a_prediction():
    assert r_squared([1, 2, 3], [1, 2, 3]) == 1
    assert r_squared([1, 2, 3], [2, 2, 2]) == 0
    assert r_squared([1, 2, 3], [3, 2, 1]) == -3
    assert r_squared([2, 2], [2, 2]) == 1
    assert r_squared([2, 2], [2, 3]) == -math.inf


def test_the_exponent_of_a_power_law():
    assert exponent([1, 2, 4, 8], [3 * x**-0.5 for x in (1, 2, 4, 8)]) == pytest.approx(-0.5)


def test_a_line_needs_two_different_x():
    with pytest.raises(InvalidValueError, match="different x"):
        fit_line([1, 1], [2, 3])
