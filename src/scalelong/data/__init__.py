"""Images, labels and captions: read from any source, checked, prepared once, and served in batches."""

from scalelong.data.catalog import CATALOG, DatasetSpec, spec_of
from scalelong.data.dataset import Captions, ImageData
from scalelong.data.encoders import (
    LatentData,
    TextEncoder,
    TokenData,
    decode_latents,
    encode_latents,
    encode_prompts,
    encode_text,
    load_text_encoder,
    load_vae,
)
from scalelong.data.prepare import load, prepared

__all__ = [
    "CATALOG", "Captions", "DatasetSpec", "ImageData", "LatentData", "TextEncoder", "TokenData", "decode_latents",
    "encode_latents", "encode_prompts", "encode_text", "load", "load_text_encoder", "load_vae", "prepared", "spec_of",
]  # fmt: skip
