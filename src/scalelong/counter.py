"""Counter-based random numbers: sample k of (seed, stream, step) does not depend on batch size or process count.

There is no state. The index (seed, stream, step, sample, element) is the counter of NumPy's Philox4x64-10
(Salmon et al., 2011), so a resumed run, a run on more processes and a replayed step draw the same numbers.
A contiguous range of samples is one vectorised draw.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import invalid

_WORDS = 4  # 64-bit words per value of Philox's counter
_CHUNK = 1 << 14  # words per Box–Muller pass: its buffers stay in the cache, 1.7 times faster
_KEY = 0x5CA1E104  # second word of the key, so that other users of Philox with the same seed draw other numbers


class Stream(IntEnum):
    """The purpose of a number. Runs on disk depend on the values: add new ones, never renumber.

    Draw a stream with one shape only: sample k starts at block k·(blocks per sample), so two shapes would overlap.
    """

    ORDER = 1  # the shuffle of an epoch
    FLIP = 2  # horizontal flips
    CAPTION = 3  # which of an image's captions
    TIME = 4  # training times t
    NOISE = 5  # training noise ε
    DROP = 6  # conditions dropped for classifier-free guidance
    SAMPLE = 7  # a sampler's x_T (step 0) and its k-th noise (step k + 1)
    PROBE_TIME = 8  # the fixed probe batch
    PROBE_NOISE = 9
    LATENT = 10  # where in an autoencoder's posterior a latent is taken
    DROPOUT = 11  # the seed of dropout at a step
    EXTRA_NOISE = 12  # extra noise on the network's input (data.extra_noise)
    LABEL = 13  # labels and captions of evaluated samples
    CAPTION_ORDER = 14
    FEATURE_NOISE = 15  # a linear probe's noise: step 0 for training images, 1 for test images
    VIEW = 16  # augmentations and times of two views for self-distillation
    VIEW_NOISE = 17


def uniform(seed: int, stream: int, step: int, first: int, count: int, shape: int | Sequence[int] = ()) -> Tensor:
    """Draw float32 (count, *shape), uniform in the open interval (0, 1), for samples first … first + count − 1.

    The values are odd multiples of 2⁻²⁴: exact in float32, so rounding produces neither 0 nor 1.
    """
    shape, size = _shape(shape)
    words = _raw(seed, stream, step, first, count, math.ceil(size / 2))  # (count, W)
    odd = (words.view("<u4") >> 8) | 1  # (count, 2W), 24 bits
    values = odd.astype(np.float32)
    values *= np.float32(2.0**-24)
    return _tensor(values, count, size, shape)


def normal(seed: int, stream: int, step: int, first: int, count: int, shape: int | Sequence[int] = ()) -> Tensor:
    """Draw float32 (count, *shape), standard normal, for samples first … first + count − 1.

    Box–Muller in float32, one 64-bit word per pair: r = √(−2 ln u) with u = (j + ½)·2⁻³², θ = 2π·k·2⁻³².
    u keeps its 32 bits where they matter, because floats are dense near 0: the tail reaches √(2 ln 2³³) = 6.76
    (P(|z| > 6.76) = 1.4e-11), where a 24-bit u would end at 5.89. Near u = 1 rounding moves r by at most 5e-4, on an
    event of probability 1e-7, and u = 1 itself gives z = 0. No value is infinite or NaN.
    """
    shape, size = _shape(shape)
    philox, width = _philox(seed, stream, step, first, count, math.ceil(size / 2))
    values = np.empty((count, 2, width), np.float32)
    rows = max(1, _CHUNK // max(1, width))
    for start in range(0, count, rows):
        chunk = values[start : start + rows]
        _box_muller(_next(philox, len(chunk), width), chunk)
    return _tensor(values.reshape(count, 2 * width), count, size, shape)


def integers(
    seed: int, stream: int, step: int, first: int, count: int, high: int, shape: int | Sequence[int] = ()
) -> Tensor:
    """Draw int64 (count, *shape), uniform in 0 … high − 1 (bias below high·2⁻⁵³)."""
    if not 1 <= high <= 2**52:
        raise invalid("high", "an integer in 1 … 2**52", high)
    shape, size = _shape(shape)
    words = _raw(seed, stream, step, first, count, size)
    values = ((words >> np.uint64(11)).astype(np.float64) * (high * 2.0**-53)).astype(np.int64)
    return _tensor(np.minimum(values, high - 1), count, size, shape)


def permutation(seed: int, stream: int, epoch: int, n: int) -> Tensor:
    """Draw int64 (n,), a random order of 0 … n − 1 for one epoch.

    It ranks 64-bit words, because the algorithm of NumPy's shuffle may change between releases.
    """
    words = _raw(seed, stream, epoch, 0, 1, n)[0, :n]
    return torch.from_numpy(np.argsort(words, kind="stable").astype(np.int64, copy=False))


def _box_muller(words: np.ndarray, out: np.ndarray) -> None:
    """Write two normals per word (n, W) into out (n, 2, W)."""
    halves = words.view("<u4").reshape(*words.shape, 2)
    radius = halves[..., 0].astype(np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    angle = halves[..., 1].astype(np.float32)
    angle *= np.float32(2.0 * math.pi * 2.0**-32)
    np.cos(angle, out=out[:, 0])
    np.sin(angle, out=out[:, 1])
    out *= radius[:, None]


def _raw(seed: int, stream: int, step: int, first: int, count: int, words: int) -> np.ndarray:
    """Return uint64 (count, W), the words of `count` samples, each padded to whole Philox blocks."""
    philox, width = _philox(seed, stream, step, first, count, words)
    return _next(philox, count, width)


def _philox(seed: int, stream: int, step: int, first: int, count: int, words: int) -> tuple[np.random.Philox, int]:
    """Return the generator positioned at sample `first`, and the words per sample (whole blocks)."""
    for name, value in (("seed", seed), ("stream", stream), ("step", step), ("first", first), ("count", count)):
        if not 0 <= value < 2**63:
            raise invalid(name, "an integer in 0 … 2**63 − 1", value)
    blocks = math.ceil(words / _WORDS)
    if (first + count) * blocks >= 2**64:  # the counter would carry into its next word
        raise invalid("first + count", f"below {2**64 // blocks} for samples of {words} words", first + count)
    key = np.array([seed, _KEY], np.uint64)
    counter = np.array([first * blocks, 0, stream, step], np.uint64)
    return np.random.Philox(key=key, counter=counter), blocks * _WORDS


def _next(philox: np.random.Philox, count: int, width: int) -> np.ndarray:
    """Return uint64 (count, width), little-endian, so that the halves of a word agree on every machine."""
    return philox.random_raw(count * width).astype("<u8", copy=False).reshape(count, width)


def _shape(shape: int | Sequence[int]) -> tuple[tuple[int, ...], int]:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(length < 0 for length in shape):
        raise invalid("shape", "without negative lengths", shape)
    return shape, math.prod(shape)


def _tensor(values: np.ndarray, count: int, size: int, shape: tuple[int, ...]) -> Tensor:
    """Drop the padding of each sample."""
    return torch.from_numpy(np.ascontiguousarray(values[:, :size])).reshape(count, *shape)
