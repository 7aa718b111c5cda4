"""The network that a config describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scalelong.errors import ScaleLongError, unknown
from scalelong.scaling import parse_scaling
from scalelong.runs.config import Config
from scalelong.training.examples import Shapes


def build_network(config: Config, shapes: Shapes) -> nn.Module:
    """The network with its initial weights, which depend on the seed and not on the scaling."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = _uvit(config, shapes) if config.model.kind == "uvit" else _unet(config, shapes)
    if config.train.gradient_checkpointing:
        net.enable_gradient_checkpointing()  # type: ignore[operator]
    return net


def _uvit(config: Config, shapes: Shapes) -> nn.Module:
    from scalelong.models import UViT

    m = config.model
    return UViT(
        img_size=shapes.size,
        in_chans=shapes.channels,
        patch_size=m.patch_size,
        embed_dim=m.embed_dim,
        depth=m.depth,
        num_heads=m.num_heads,
        mlp_ratio=m.mlp_ratio,
        qkv_bias=m.qkv_bias,
        mlp_time_embed=m.mlp_time_embed,
        conv=m.conv,
        init_std=m.init_std,
        num_classes=shapes.label_rows,
        clip_dim=shapes.text_width,
        num_clip_token=shapes.text_tokens,
        scaling=parse_scaling(config.scaling),
    )


def _unet(config: Config, shapes: Shapes) -> nn.Module:
    from scalelong.models.unet import UNETS, build_unet

    m = config.model
    if m.unet is None or m.unet not in UNETS:
        raise unknown("model.unet", str(m.unet), UNETS)
    conditional = UNETS[m.unet]["class"] == "UNet2DConditionModel"
    if conditional != bool(shapes.text_width):
        needed = "needs text (data.text)" if conditional else "takes no text (data.text)"
        raise ScaleLongError(f"U-Net {m.unet!r} {needed}")
    options: dict[str, Any] = {"sample_size": shapes.size}
    options |= {"in_channels": shapes.channels, "out_channels": shapes.channels}
    if not conditional:
        options["num_class_embeds"] = shapes.label_rows
    if shapes.text_width:
        options["cross_attention_dim"] = shapes.text_width
    if m.channels is not None:
        levels = len(UNETS[m.unet]["block_out_channels"])
        if len(m.channels) != levels:
            raise ScaleLongError(f"model.channels has {len(m.channels)} numbers; U-Net {m.unet!r} has {levels} levels")
        options |= {"block_out_channels": m.channels, "attention_head_dim": min(8, *m.channels)}
    if m.layers is not None:
        options["layers_per_block"] = m.layers
    return build_unet(m.unet, scaling=parse_scaling(config.scaling), **options)
