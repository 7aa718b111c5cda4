"""The rule: where an interval lies against the region that the paper predicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.experiments.statistics import Estimate
from scalelong.paper.judge import AGREES, DISAGREES, NO_VERDICT, OPEN, Claim, Region, above, below
from scalelong.paper.norms import SIZES, ratio_in_blocks


def judge(estimate, region):
    return Claim("text", "quantity", region, estimate).verdict


def interval(low, high):
    return Estimate((low + high) / 2, low, high, 3)


@pytest.mark.parametrize(
    ("ends", "region", "expected"),
    [
        ((0.7, 0.9), below(1.0), AGREES),
        ((0.7, 1.1), below(1.0), OPEN),
        ((1.01, 1.2), below(1.0), DISAGREES),
        ((1.0, 1.2), below(1.0), DISAGREES),  # the region is open: nothing of the interval is in it
        ((0.9, 1.0), below(1.0), OPEN),
        ((1.2, 1.9), above(1.0), AGREES),
        ((0.8, 0.99), above(1.0), DISAGREES),
        ((0.96, 1.04), Region(0.95, 1.05), AGREES),
        ((0.90, 1.04), Region(0.95, 1.05), OPEN),
        ((0.80, 1.20), Region(0.95, 1.05), OPEN),
        ((1.06, 1.20), Region(0.95, 1.05), DISAGREES),
        ((0.80, 0.94), Region(0.95, 1.05), DISAGREES),
    ],
)
def test_the_verdict_follows_from_the_interval(ends, region, expected):
    assert judge(interval(*ends), region) == expected


def test_without_an_interval_there_is_no_verdict():
    assert judge(None, below(1.0)) == NO_VERDICT
    assert judge(Estimate(0.1, None, None, 1), below(1.0)) == NO_VERDICT


@given(st.floats(0.01, 100), st.floats(0, 10), st.floats(0.01, 100))
def test_opposite_predictions_never_both_agree_and_swap_agreement_for_disagreement(low, width, edge):
    found = interval(low, low + width)
    one, other = judge(found, below(edge)), judge(found, above(edge))
    assert (one, other) != (AGREES, AGREES)
    if one == AGREES:
        assert other == DISAGREES
    if one == OPEN:
        assert other == OPEN or low + width == edge or low == edge


def test_a_claim_writes_down_all_that_its_verdict_rests_on():
    facts = Claim("CS lowers x", "x, CS / none", below(1.0), interval(0.5, 0.7), "FID 2.98 / 3.11").to_dict()
    assert facts["verdict"] == AGREES
    assert facts["region"] == [None, 1.0]
    assert facts["predicted"] == "below 1"
    assert (facts["measured"]["low"], facts["measured"]["high"]) == (0.5, 0.7)


@pytest.mark.parametrize(("size", "scale"), [("norm", 1.0), ("absolute", 0.0)])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_intervals_over_blocks_cover_the_true_ratio(size, scale, correlation):
    """50 stored snapshots, as in the second half of a recorded run, with the autocorrelation that was measured."""
    rng, covered = np.random.default_rng(3), 0
    for _ in range(300):
        noise = rng.normal(0, 1, (2, 50, 2))
        for k in range(1, 50):
            noise[:, k] = correlation * noise[:, k - 1] + np.sqrt(1 - correlation**2) * noise[:, k]
        own, base = (dict(enumerate((10 * scale + side).tolist())) for side in noise)
        found = ratio_in_blocks(own, base, SIZES[size])
        covered += found.low <= 1 <= found.high
    assert covered / 300 > 0.9


def test_the_ratio_of_bands_is_that_of_the_root_mean_squares():
    rng = np.random.default_rng(3)
    wide, narrow = (dict(enumerate(rng.normal(0, sigma, (400, 2)).tolist())) for sigma in (3.0, 1.0))
    found = ratio_in_blocks(wide, narrow, SIZES["absolute"])
    assert found.mean == pytest.approx(3, rel=0.1)
    assert found.low < 3 < found.high


def test_equal_runs_have_a_ratio_of_one_and_too_few_looks_none():
    norms = {k: [5 + (-1.0) ** k] for k in range(20)}
    same = ratio_in_blocks(norms, norms)
    assert (same.mean, same.low, same.high) == (1.0, 1.0, 1.0)
    assert ratio_in_blocks({0: [1.0]}, {0: [2.0]}) is None
    assert ratio_in_blocks({}, norms) is None
