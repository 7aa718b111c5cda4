"""Numbers by counter: where a number stands decides it, and the distributions are what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from scalelong import counter
from scalelong.counter import Stream
from scalelong.errors import InvalidValueError

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
places = st.tuples(st.integers(0, 2**63 - 1), st.sampled_from(Stream), st.integers(0, 2**40))
DRAWS = {
    "uniform": counter.uniform,
    "normal": counter.normal,
    "integers": lambda *place, shape=(): counter.integers(*place, 1000, shape),
}


@pytest.mark.parametrize("draw", DRAWS)
@given(place=places, shape=shapes, first=st.integers(0, 2**40), sizes=st.lists(st.integers(0, 9), max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_split_into_batches_gives_the_same_numbers(draw, place, shape, first, sizes):
    function = DRAWS[draw]
    whole = function(*place, first, sum(sizes), shape=shape)
    assert whole.shape == (sum(sizes), *shape)
    start = first
    parts = [whole[:0]]
    for size in sizes:
        parts.append(function(*place, start, size, shape=shape))
        start += size
    assert torch.equal(torch.cat(parts), whole)


def test_large_batches_split_bit_for_bit():
    # Long enough for vector instructions, unaligned pieces and several chunks inside one draw.
    shape = (3, 17, 19)
    whole = counter.normal(5, Stream.NOISE, 11, 100, 200, shape)
    for batch in (1, 7, 64, 199):
        parts = [counter.normal(5, Stream.NOISE, 11, 100 + k, min(batch, 200 - k), shape) for k in range(0, 200, batch)]
        assert torch.equal(torch.cat(parts), whole)


def test_seeds_streams_steps_and_samples_all_differ():
    rows = [
        counter.normal(seed, stream, step, sample, 1, 512)[0]
        for seed in (0, 1, 2**62)
        for stream in (Stream.TIME, Stream.NOISE)
        for step in (0, 1, 10**9)
        for sample in (0, 1, 10**12)
    ]
    correlation = torch.corrcoef(torch.stack(rows)).fill_diagonal_(0)
    # 54·53/2 = 1431 correlations of standard deviation 512^-½; the largest of as many normals stays under 5 of them.
    assert correlation.abs().max() < 5 / math.sqrt(512)


def test_normals_are_normal():
    z = counter.normal(3, Stream.NOISE, 0, 0, 400, (3, 32, 32)).double().flatten()
    n = z.numel()
    assert z.isfinite().all()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) - moment**2)  # Var zᵖ = E z²ᵖ − (E zᵖ)²
        assert abs((z**power).mean().item() - moment) < 4 * spread / math.sqrt(n)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3


def test_the_two_normals_of_a_pair_are_independent():
    z = counter.normal(3, Stream.NOISE, 0, 0, 1000, 1024).numpy()
    first, second = z[:, :512].ravel(), z[:, 512:].ravel()
    for transform in (np.asarray, np.square, np.abs):
        correlation = np.corrcoef(transform(first), transform(second))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(first.size)


def test_tails_hold_as_many_as_they_should():
    z = counter.normal(0, Stream.SAMPLE, 7, 0, 64, 2**17).abs()
    for threshold in (4.0, 4.5, 5.0):
        expected = z.numel() * 2 * stats.norm.sf(threshold)
        low, high = stats.poisson.interval(0.9999, expected)
        assert low <= (z > threshold).sum().item() <= high


def test_extreme_words_give_finite_normals_with_the_stated_tail():
    words = np.array([[0, 2**64 - 1, 2**32 - 1, 2**64 - 2**32]], np.uint64)
    out = np.empty((1, 2, 4), np.float32)
    counter._box_muller(words, out)
    assert np.isfinite(out).all()
    assert np.abs(out).max() == pytest.approx(math.sqrt(2 * math.log(2**33)), rel=1e-6)


def test_uniforms_are_uniform_and_never_reach_the_ends():
    u = counter.uniform(0, Stream.TIME, 0, 0, 1000, 1000)
    assert u.min() >= 2.0**-24
    assert u.max() <= 1 - 2.0**-24
    assert stats.kstest(u.flatten().double().numpy(), "uniform").pvalue > 1e-3
    # The ends of the grid themselves are exact in float32, open on both sides.
    assert 0 < np.float32(1) * np.float32(2.0**-24) < np.float32(2**24 - 1) * np.float32(2.0**-24) < 1


def test_integers_are_uniform_over_their_range():
    drawn = counter.integers(0, Stream.CAPTION, 0, 0, 7000, 7, 10)
    counts = torch.bincount(drawn.flatten(), minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    assert counter.integers(0, Stream.CAPTION, 0, 0, 50, 1).eq(0).all()


@given(place=places, n=st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_a_permutation_is_one(place, n):
    order = counter.permutation(*place, n)
    assert torch.equal(order.sort().values, torch.arange(n))
    assert torch.equal(order, counter.permutation(*place, n))


def test_permutations_are_even():
    # Each element stands at each place equally often over epochs.
    orders = torch.stack([counter.permutation(1, Stream.ORDER, epoch, 5) for epoch in range(5000)])
    counts = torch.stack([(orders == element).sum(0) for element in range(5)])
    assert stats.chisquare(counts.flatten().numpy()).pvalue > 1e-3


def test_the_numbers_stay_what_they_are_between_releases():
    # Written down once: a change here would make every stored run resume wrongly.
    assert counter.normal(0, Stream.NOISE, 0, 0, 1, 4)[0].tolist() == pytest.approx(
        [1.6410038, 0.2665031, -0.7527562, -1.0465064], abs=1e-6
    )
    assert counter.uniform(1, Stream.TIME, 2, 3, 4).tolist() == [
        0.3396671414375305,
        0.2537394165992737,
        0.022105753421783447,
        0.3164023756980896,
    ]
    assert counter.permutation(0, Stream.ORDER, 0, 8).tolist() == [6, 2, 5, 0, 1, 7, 4, 3]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: counter.normal(-1, 1, 0, 0, 1), "seed"),
        (lambda: counter.normal(0, 1, -2, 0, 1), "step"),
        (lambda: counter.uniform(0, 1, 0, -1, 1), "first"),
        (lambda: counter.uniform(2**63, 1, 0, 0, 1), "seed"),
        (lambda: counter.uniform(0, 1, 0, 0, 1, (-3,)), "shape"),
        (lambda: counter.integers(0, 1, 0, 0, 1, 0), "high"),
        (lambda: counter.normal(0, 1, 0, 2**62, 1, 100), r"first \+ count"),
    ],
)
def test_what_cannot_be_drawn_is_named(call, says):
    with pytest.raises(InvalidValueError, match=says):
        call()
