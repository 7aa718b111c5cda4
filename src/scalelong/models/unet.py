"""Convolutional U-Nets as diffusers networks: `build_unet(name)` at the paper's sizes, `unet_settings` for any size."""

from collections.abc import Sequence
from math import gcd
from typing import Any

from torch import nn

from scalelong.errors import invalid, require, unknown
from scalelong.scaling import Scaling, parse_scaling
from scalelong.skips import apply

# The sizes of Table 1, with attention at the resolutions of DDPM and IDDPM. They have 12, 16 and 9 long skips.
UNETS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "class": "UNet2DModel", "sample_size": 32, "in_channels": 3, "out_channels": 3,
        "block_out_channels": (128, 256, 256, 256), "layers_per_block": 2, "attention_head_dim": 256,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "norm_eps": 1e-6, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1,
    },
    "imagenet64": {
        "class": "UNet2DModel", "sample_size": 64, "in_channels": 3, "out_channels": 3,
        "block_out_channels": (128, 256, 512, 512), "layers_per_block": 3, "attention_head_dim": 64,
        "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        "num_class_embeds": 1001,  # 1000 classes and the null label
    },
    "coco": {
        "class": "UNet2DConditionModel", "sample_size": 32, "in_channels": 4, "out_channels": 4,
        "block_out_channels": (128, 256, 384), "layers_per_block": 2, "attention_head_dim": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 768,
    },
}  # fmt: skip


def unet_settings(
    size: int,
    channels: Sequence[int] | None = None,
    layers: int = 2,
    attention: Sequence[int] | None = None,
    text_width: int | None = None,
) -> dict[str, Any]:
    """Return the settings of a diffusers U-Net for images of any size, in the form of an entry of `UNETS`.

    Args:
        size: Height and width of the images. Each level but the last halves it.
        channels: One width per level. Default: as many levels as keep 4 pixels (at most 4), of 64, 128, 128… channels.
        layers: Residual blocks per level.
        attention: Feature map sizes with attention. Default: those of at most 16 pixels, except the first level.
        text_width: Width of the text tokens; the levels with attention then attend to them.
    """
    if channels is None:
        levels = next(n for n in (4, 3, 2, 1) if size % 2 ** (n - 1) == 0 and (size >> (n - 1) >= 4 or n == 1))
        channels = (64, 128, 128, 128)[:levels]
    common = gcd(*channels)
    if common < 1:
        raise invalid("model.channels", "one width >= 1 per level", tuple(channels))
    groups = max(n for n in range(1, 33) if common % n == 0 and 4 * n <= max(4, common))  # 4 or more channels each
    head = max(n for n in range(1, 33) if common % n == 0)
    return {
        "class": "UNet2DConditionModel" if text_width else "UNet2DModel",
        "sample_size": size,
        "block_out_channels": tuple(channels),
        "layers_per_block": layers,
        "norm_num_groups": groups,
        # the conditional class takes the number of heads under this name
        "attention_head_dim": tuple(width // head for width in channels) if text_width else head,
        **({"cross_attention_dim": text_width} if text_width else {}),
        **attention_blocks(level_sizes(size, len(channels)), attention, bool(text_width)),
    }


def level_sizes(size: int, levels: int) -> list[int]:
    """Return the feature map size of every level, or raise if one cannot be halved."""
    if size % 2 ** (levels - 1):
        expected = f"divisible by 2^{levels - 1} = {2 ** (levels - 1)} for a U-Net of {levels} levels"
        raise invalid("the image size", expected, size, "set data.image_size, or fewer levels by model.channels")
    return [size >> level for level in range(levels)]


def attention_blocks(sizes: Sequence[int], attention: Sequence[int] | None, text: bool = False) -> dict[str, Any]:
    """Return the block types of levels with these feature map sizes."""
    attention = [size for size in sizes[1:] if size <= 16] if attention is None else attention
    if not set(attention) <= set(sizes):
        raise invalid("model.attention", f"feature map sizes out of {', '.join(map(str, sizes))}", tuple(attention))
    prefix = ["CrossAttn" if text and size in attention else "Attn" if size in attention else "" for size in sizes]
    return {
        "down_block_types": tuple(f"{word}DownBlock2D" for word in prefix),
        "up_block_types": tuple(f"{word}UpBlock2D" for word in reversed(prefix)),
        **({} if text else {"add_attention": bool(attention)}),
    }


def build_unet(
    name: str | dict[str, Any], scaling: Scaling | str | dict[str, Any] | None = None, **overrides: Any
) -> nn.Module:
    """Build a diffusers U-Net of one of the paper's sizes, or of `unet_settings`, with scaled long skips.

    Args:
        name: "cifar10" (35.7M, unconditional), "imagenet64" (144M, classes) or "coco" (53M, text, latents); or a dict.
        scaling: Spec or name of a scaling.
        **overrides: Arguments of diffusers' class, for example to make it smaller.

    Returns:
        diffusers' `UNet2DModel` or `UNet2DConditionModel`.

    Examples:
        >>> net = scalelong.build_unet("cifar10", "cs:0.7", block_out_channels=(32,) * 4, attention_head_dim=32)
        >>> type(net).__name__, len(scalelong.describe(net).rows)
        ('UNet2DModel', 12)
    """
    if isinstance(name, str) and name not in UNETS:
        raise unknown("U-Net", name, UNETS)
    diffusers = require("diffusers", extra="train", purpose="build_unet")
    config = {**(UNETS[name] if isinstance(name, str) else name), **overrides}
    net: nn.Module = getattr(diffusers, config.pop("class"))(**config)
    return apply(net, parse_scaling(scaling))
