"""The paper's networks: U-ViT, diffusers' U-Nets at the paper's sizes, and Eq. 3's network for the theory."""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "UViT": "scalelong.models.uvit",
    "build_unet": "scalelong.models.unet",
    "StackedUNet": "scalelong.models.stacked",
}
__all__ = ["StackedUNet", "UViT", "build_unet"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'scalelong.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
