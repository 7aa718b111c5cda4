"""Many small results read from their device at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read(values: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape, stacked where the first is and brought to the CPU as float64: one wait for the device."""
    if len({(value.device, value.dtype) for value in values}) > 1:
        place = values[0].device
        wide = torch.float32 if place.type == "mps" else torch.float64
        values = [value.to(place, wide) for value in values]
    return torch.stack(list(values)).cpu().double()
