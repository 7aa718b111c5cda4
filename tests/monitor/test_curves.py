"""Norm, growth and absolute oscillation, on curves whose values are known."""

import numpy as np
import pytest
import torch

from scalelong.monitor import curves as monitor_curves

STEPS = np.arange(10.0, 10_010.0, 10.0)


def norm_curves(steps, norms):
    curves = monitor_curves.norm_curves(torch.from_numpy(steps), torch.from_numpy(norms))
    return monitor_curves.NormCurves(*(curve.numpy() for curve in curves))


def test_a_power_law_has_its_exponent_its_size_and_no_band():
    curves = norm_curves(STEPS, np.stack([3 * STEPS**0.5, np.full_like(STEPS, 7.0)], axis=1))
    assert curves.growth == pytest.approx([0.5, 0.0], abs=1e-9)
    assert curves.final[1] == 7
    assert curves.final[0] == pytest.approx(3 * 9500**0.5, rel=1e-3)
    assert curves.band[1] == 0
    assert curves.band[0] < 0.01 * curves.final[0]


def test_the_band_is_the_standard_deviation_of_noise_around_the_curve():
    noise = np.random.default_rng(0).normal(0, 2.0, len(STEPS))
    curves = norm_curves(STEPS, (100 + 0.01 * STEPS + noise)[:, None])
    assert curves.band[0] == pytest.approx(2.0, rel=0.1)  # absolute: the size of the norm does not matter
    doubled = norm_curves(STEPS, 2 * (100 + 0.01 * STEPS + noise)[:, None])
    assert doubled.band[0] == pytest.approx(2 * curves.band[0])


def test_missing_and_infinite_snapshots_are_ignored():
    norms = (3 * STEPS**0.5)[:, None].repeat(3, axis=1)
    norms[5, 0], norms[7, 1], norms[:, 2] = np.nan, np.inf, np.nan
    curves = norm_curves(STEPS, norms)
    assert curves.growth[:2] == pytest.approx([0.5, 0.5], abs=1e-6)
    assert np.isfinite(curves.final[:2]).all()
    assert np.isnan([curves.growth[2], curves.final[2], curves.band[2]]).all()
    assert curves.smooth.shape == norms.shape
