"""Images, classes and captions: found, checked, prepared once, and given out in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.data.catalog": ("CATALOG", "spec_of"),
        "scalelong.data.captions": ("Captions",),
        "scalelong.data.dataset": ("ImageData",),
        "scalelong.data.latents": ("LatentData", "decode_latents", "encode_latents", "load_vae"),
        "scalelong.data.prepare": ("load", "prepared"),
        "scalelong.data.spec": ("DatasetSpec",),
        "scalelong.data.text_encoder": ("TextEncoder", "encode_prompts", "load_text_encoder"),
        "scalelong.data.tokens": ("TokenData", "encode_text"),
    },
)

if TYPE_CHECKING:
    from scalelong.data.captions import Captions as Captions
    from scalelong.data.catalog import CATALOG as CATALOG
    from scalelong.data.catalog import spec_of as spec_of
    from scalelong.data.dataset import ImageData as ImageData
    from scalelong.data.latents import LatentData as LatentData
    from scalelong.data.latents import decode_latents as decode_latents
    from scalelong.data.latents import encode_latents as encode_latents
    from scalelong.data.latents import load_vae as load_vae
    from scalelong.data.prepare import load as load
    from scalelong.data.prepare import prepared as prepared
    from scalelong.data.spec import DatasetSpec as DatasetSpec
    from scalelong.data.text_encoder import TextEncoder as TextEncoder
    from scalelong.data.text_encoder import encode_prompts as encode_prompts
    from scalelong.data.text_encoder import load_text_encoder as load_text_encoder
    from scalelong.data.tokens import TokenData as TokenData
    from scalelong.data.tokens import encode_text as encode_text
