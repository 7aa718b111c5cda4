"""Resizing against a direct transcription of TensorFlow 1's definition, and against torch-fidelity's."""

import math

import numpy as np
import torch
from fidelity_peer import fidelity
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.evaluation.resize import resize_tf1


def transcription(image: np.ndarray, size: int) -> np.ndarray:
    """tf.image.resize_bilinear(align_corners=False), pixel by pixel, in float32 as TensorFlow 1 computes it."""
    height, width, channels = image.shape
    f = np.float32
    scale_y, scale_x = f(height) / f(size), f(width) / f(size)
    out = np.empty((size, size, channels), np.float32)
    for y in range(size):
        in_y = f(y) * scale_y
        top, dy = math.floor(in_y), f(in_y - f(math.floor(in_y)))
        bottom = min(top + 1, height - 1)
        for x in range(size):
            in_x = f(x) * scale_x
            left, dx = math.floor(in_x), f(in_x - f(math.floor(in_x)))
            right = min(left + 1, width - 1)
            for c in range(channels):
                tl, tr = f(image[top, left, c]), f(image[top, right, c])
                bl, br = f(image[bottom, left, c]), f(image[bottom, right, c])
                upper = tl + (tr - tl) * dx
                lower = bl + (br - bl) * dx
                out[y, x, c] = upper + (lower - upper) * dy
    return out


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_resize_is_the_definition_bit_for_bit(height, width, channels, size, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    resized = resize_tf1(torch.from_numpy(image)[None], size)
    assert resized.shape == (1, channels, size, size)
    np.testing.assert_array_equal(resized[0].permute(1, 2, 0).numpy(), transcription(image, size))


def test_cifar_to_299_is_the_definition_bit_for_bit():
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 1), dtype=np.uint8)
    resized = resize_tf1(torch.from_numpy(image)[None], 299)[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(resized, transcription(image, 299))


def test_an_image_of_the_size_asked_for_is_unchanged():
    image = torch.randint(0, 256, (2, 299, 299, 3), dtype=torch.uint8)
    assert torch.equal(resize_tf1(image, 299).permute(0, 2, 3, 1), image.float())


def test_resize_is_not_torchs_bilinear():
    """Half-pixel centres, torch's only convention, are another function: FIDs made with them do not compare."""
    image = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
    torch_bilinear = torch.nn.functional.interpolate(image.permute(0, 3, 1, 2).float(), (299, 299), mode="bilinear")
    assert (resize_tf1(image, 299) - torch_bilinear).abs().max() > 10


def test_resized_images_are_channels_last_in_memory():
    resized = resize_tf1(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), 16)
    assert resized.is_contiguous(memory_format=torch.channels_last)


def test_resize_agrees_with_torch_fidelity():
    peer = fidelity("interpolate_compat_tensorflow").interpolate_bilinear_2d_like_tensorflow1x
    image = torch.randint(0, 256, (2, 33, 47, 3), dtype=torch.uint8)
    theirs = peer(image.permute(0, 3, 1, 2).float(), size=(299, 299), align_corners=False)
    assert torch.equal(resize_tf1(image, 299), theirs)
