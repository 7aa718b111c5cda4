"""The paper's convolutional U-Nets, as diffusers networks: `build_unet(name)` returns diffusers' own class."""

from typing import Any

from torch import nn

from scalelong.errors import require, unknown
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


def build_unet(name: str, scaling: Scaling | str | dict[str, Any] | None = None, **overrides: Any) -> nn.Module:
    """Build a diffusers U-Net of one of the paper's sizes, with scaled long skips.

    Args:
        name: "cifar10" (35.7M, unconditional), "imagenet64" (144M, classes) or "coco" (53M, text, latents).
        scaling: Spec or name of a scaling.
        overrides: Arguments of diffusers' class, for example to make it smaller.
    """
    if name not in UNETS:
        raise unknown("U-Net", name, UNETS)
    diffusers = require("diffusers", extra="train", purpose="build_unet")
    config = {**UNETS[name], **overrides}
    net: nn.Module = getattr(diffusers, config.pop("class"))(**config)
    return apply(net, parse_scaling(scaling))
