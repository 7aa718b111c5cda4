"""Oscillation is the standard deviation of the step-to-step differences of a norm's logarithm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.monitor.snapshot import Window, jumps, spread, typical
from scalelong.monitor.summary import trends


def oscillation(norms):
    """Return the oscillation of a norm recorded at consecutive steps, None for fewer than two jumps."""
    values = [math.nan if norm is None else norm for norm in norms]
    value = float(spread(torch.tensor(jumps(values[1:], values[:-1]), dtype=torch.float64)[:, None]))
    return None if math.isnan(value) else value


norms = st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=40)


@given(norms)
def test_oscillation_is_the_standard_deviation_of_log_differences(values):
    assert oscillation(values) == pytest.approx(np.std(np.diff(np.log(values))), rel=1e-9, abs=1e-12)


@given(norms, st.floats(1e-3, 1e3))
def test_oscillation_does_not_depend_on_the_unit(values, factor):
    assert oscillation([factor * v for v in values]) == pytest.approx(oscillation(values), abs=1e-9)


def test_steady_growth_does_not_oscillate():
    assert oscillation([1.1**k for k in range(20)]) == pytest.approx(0.0, abs=1e-12)


def test_a_zigzag_has_the_size_of_its_jumps():
    assert oscillation([1.0, math.e] * 10 + [1.0]) == pytest.approx(1.0)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [1.0, None, 2.0, None, 3.0], [0.0, 0.0, 0.0, 0.0]])
def test_fewer_than_two_jumps_have_no_oscillation(values):
    assert oscillation(values) is None


@pytest.mark.parametrize("hole", [None, math.nan, math.inf, 0.0])
def test_a_missing_norm_removes_its_two_jumps(hole):
    values = [1.0, 2.0, 3.0, hole, 5.0, 8.0, 9.0]
    differences = [math.log(2), math.log(3 / 2), math.log(8 / 5), math.log(9 / 8)]
    assert oscillation(values) == pytest.approx(np.std(differences))


def test_each_column_has_its_own_oscillation():
    rows = torch.tensor([[0.1, 1.0], [0.2, math.nan], [0.3, 3.0]], dtype=torch.float64)
    assert spread(rows).tolist() == pytest.approx([np.std([0.1, 0.2, 0.3]), np.std([1.0, 3.0])])


@settings(max_examples=20)
@given(st.integers(2, 10), st.integers(2, 30))
def test_the_window_drops_old_jumps(length, count):
    rows = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    window = Window(length)
    for row in rows:
        window.add(row)
    expected = rows[-length:].std(0, correction=0)
    assert torch.allclose(window.oscillation(), expected)


def test_halves_need_enough_jumps():
    window = Window(8)
    for k in range(4):
        window.add(torch.tensor([0.1 * (-1) ** k]))
    assert window.halves(3) is None
    for k in range(4):
        window.add(torch.tensor([0.4 * (-1) ** k]))
    older, newer = window.halves(3)
    assert (float(spread(older)), float(spread(newer))) == pytest.approx((0.1, 0.4))


def test_a_single_jump_does_not_raise_the_typical_jump():
    calm = torch.tensor([[0.01 * (-1) ** k] for k in range(20)])
    jump = calm.clone()
    jump[7] = 0.5
    assert float(spread(jump)) > 5 * float(spread(calm))
    assert float(typical(jump)) < 1.5 * float(typical(calm))


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_without_a_logarithm_has_no_jump(norm):
    missing, jump = jumps([norm, math.e], [1.0, 1.0])
    assert math.isnan(missing)
    assert jump == pytest.approx(1.0)


def test_snapshots_without_jumps_push_older_jumps_out_of_the_window():
    window, row = Window(2), torch.ones(1)
    counts = []
    for differences in (None, row, None, None, None, torch.full((1,), math.nan)):
        window.add(differences)
        counts.append(len(window.rows))
    assert counts == [0, 1, 1, 0, 0, 0]
    assert window.oscillation() is None


def test_the_trend_of_a_window_is_growth_and_the_spread_around_the_smoothed_curve():
    exact = [{"step": step, "train": {"backbone": [3.0 * step**0.5, 2.0]}} for step in range(1000, 1500, 10)]
    grown, constant = trends(exact, "backbone", 2)
    assert grown.norm == pytest.approx(3.0 * 1490**0.5)
    assert grown.growth == pytest.approx(0.5)
    assert grown.absolute < 1e-3 * grown.norm  # the trend itself is no oscillation
    assert constant == (2.0, pytest.approx(0), 0)
    wavy = [{"step": step, "train": {"backbone": [100 + (-1) ** k]}} for k, step in enumerate(range(1000, 1500, 10))]
    assert trends(wavy, "backbone", 1)[0].absolute == pytest.approx(0.8, rel=0.05)  # a fifth of it is in the mean of 5
    assert trends(wavy[:9], "backbone", 1)[0].absolute is None
    assert trends(wavy[:2], "backbone", 1)[0].growth is None
    assert trends([], "backbone", 1) == [(None, None, None)]


def test_the_trend_of_a_step_that_repeats_has_no_growth():
    entries = [{"step": 5, "train": {"backbone": [1.0 + k]}} for k in range(4)]  # numbered per epoch, by mistake
    assert trends(entries, "backbone", 1) == [(4.0, None, None)]
