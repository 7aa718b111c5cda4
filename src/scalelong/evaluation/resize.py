"""Bilinear resizing as TensorFlow 1 did it, which is part of what FID means."""

from __future__ import annotations

import torch
from torch import Tensor

TF1_BILINEAR = "TF1 bilinear (no antialias, src = dst·scale)"


def resize_tf1(images: Tensor, size: int) -> Tensor:
    """uint8 (B, H, W, C) → float32 (B, C, size, size) in 0 … 255, channels last in memory.

    `tf.image.resize_bilinear(align_corners=False)` of TensorFlow 1: output pixel y reads input rows ⌊y·s⌋ and
    min(⌊y·s⌋ + 1, H − 1) with s = H/size, all in float32. No half-pixel shift, no antialias: other tools'
    bilinear is another function, and gives another FID. Rows and columns are interpolated in TensorFlow's order,
    columns first, each input row once, so the result is TensorFlow's bit for bit.
    """
    height, width = images.shape[1:3]
    x = images.to(torch.float32)  # (B, H, W, C)
    low, high, weight = _taps(width, size, images.device)
    left, right = x.index_select(2, low), x.index_select(2, high)  # (B, H, size, C)
    x = left + (right - left) * weight[:, None]
    low, high, weight = _taps(height, size, images.device)
    top, bottom = x.index_select(1, low), x.index_select(1, high)  # (B, size, size, C)
    return (top + (bottom - top) * weight[:, None, None]).permute(0, 3, 1, 2)


def _taps(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` outputs: the lower and upper input index, and the upper one's weight."""
    scale = torch.tensor(length, dtype=torch.float32) / torch.tensor(size, dtype=torch.float32)
    position = torch.arange(size, dtype=torch.float32) * scale
    low = position.floor()
    weight = position - low
    low = low.long().clamp_max(length - 1)  # float32 may round the last position up to `length`
    high = (low + 1).clamp_max(length - 1)
    return low.to(device), high.to(device), weight.to(device)
