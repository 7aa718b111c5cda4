"""The paper's networks: U-ViT, and diffusers' U-Nets in the paper's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.models.unet": ("build_unet",),
        "scalelong.models.uvit": ("UViT",),
    },
)

if TYPE_CHECKING:
    from scalelong.models.unet import build_unet as build_unet
    from scalelong.models.uvit import UViT as UViT
