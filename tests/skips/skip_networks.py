"""Every kind of network that `scalelong.apply` understands, tiny: what the contract tests run over."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from homemade import GuidedUNet, OriginalUViT
from torch import Tensor, nn

from peers import lucidrains


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a network."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """One network under test, with what is known of it without scalelong.

    skips     N, counted by hand from its configuration
    middle    the module between encoder and decoder
    axis      the channels' axis at the joins
    normed    a normalisation sees the concatenation first, so that placement="after_norm" is offered
    feels     κ reaches the consumer whole ("join"): nothing there cancels it
    checkpoint   switches gradient checkpointing on, where the network can
    """

    build: Callable[[], nn.Module]
    example: Callable[[], Call]
    skips: int
    middle: str = "mid_block"
    axis: int = 1
    normed: bool = True
    feels: bool = False
    checkpoint: Callable[[nn.Module], None] | None = None


def make(name: str) -> nn.Module:
    """A fresh copy of a network, with the same weights each time, in eval mode."""
    return copy.deepcopy(_prototype(name))


@functools.cache
def example(name: str) -> Call:
    with _seed(1):
        return (NETWORKS | VARIANTS)[name].example()


def run(net: nn.Module, name: str) -> Tensor:
    """The network's output, one tensor, on the example of `name`."""
    call = example(name)
    out = net(*call.args, **call.kwargs)
    while not isinstance(out, Tensor):
        out = out[0]
    return out


@functools.cache
def _prototype(name: str) -> nn.Module:
    with _seed(0):
        net = (NETWORKS | VARIANTS)[name].build().eval()
        for parameter in net.parameters():  # layers that start at zero would hide everything before them
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.2)
    return net


@contextmanager
def _seed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn of while they are built is not what is tested here
        torch.manual_seed(seed)
        yield


# ------------------------------------------------------------------------------------------- diffusers


def _diffusers(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**config)

    return build


def _enable(net: nn.Module) -> None:
    net.enable_gradient_checkpointing()


SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
ONE_LEVEL = {**SMALL, "block_out_channels": (8,)}  # what is many layers deep without it
CROSS = {
    **SMALL,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
}
T = torch.tensor([3, 400])


def _image(channels: int, *size: int) -> Callable[[], Call]:
    return lambda: Call((torch.randn(2, channels, *size), T))


def _latent_and_text(*size: int, frames: tuple[int, ...] = (), **kwargs: Callable[[], Any]) -> Callable[[], Call]:
    return lambda: Call(
        (torch.randn(2, 4, *frames, *size), T, torch.randn(2, 5, 8)), {k: make() for k, make in kwargs.items()}
    )


def _hunyuan_example() -> Call:
    text, mask = torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.long)
    return Call(
        (torch.randn(2, 4, 8, 8), torch.tensor([3.0, 400.0])),
        {
            "encoder_hidden_states": text,
            "text_embedding_mask": mask,
            "encoder_hidden_states_t5": torch.randn(2, 4, 8),
            "text_embedding_mask_t5": torch.ones(2, 4, dtype=torch.long),
        },
    )


DIFFUSERS = {
    "UNet2DModel": Network(
        _diffusers("UNet2DModel", **SMALL, attention_head_dim=8,
                   down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        _image(3, 8, 8), skips=4, checkpoint=_enable),
    "UNet2DConditionModel": Network(
        _diffusers("UNet2DConditionModel", **CROSS), _latent_and_text(8, 8), skips=4, checkpoint=_enable),
    "SDXL": Network(
        _diffusers("UNet2DConditionModel", **{**CROSS, "attention_head_dim": (2, 4)}, use_linear_projection=True,
                   transformer_layers_per_block=(1, 2), addition_embed_type="text_time", addition_time_embed_dim=4,
                   projection_class_embeddings_input_dim=6 * 4 + 8),
        _latent_and_text(8, 8, added_cond_kwargs=lambda: {"text_embeds": torch.randn(2, 8),
                                                          "time_ids": torch.ones(2, 6)}),
        skips=4, checkpoint=_enable),
    "K-blocks": Network(
        _diffusers("UNet2DConditionModel", sample_size=8, block_out_channels=(32, 64, 64), layers_per_block=2,
                   down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
                   up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
                   mid_block_type=None, cross_attention_dim=8, attention_head_dim=8, act_fn="gelu",
                   norm_num_groups=None, time_embedding_type="fourier", timestep_post_act="gelu",
                   resnet_time_scale_shift="scale_shift", conv_in_kernel=1, conv_out_kernel=1),
        _latent_and_text(8, 8), skips=2, middle="down_blocks.2", checkpoint=_enable),
    "UNet1DModel": Network(
        _diffusers("UNet1DModel", sample_size=32, in_channels=2, out_channels=2, extra_in_channels=16,
                   block_out_channels=(8, 32, 64), layers_per_block=1),
        lambda: Call((torch.randn(2, 2, 32), T)), skips=3, normed=False, feels=True),
    "UNet3DConditionModel": Network(
        _diffusers("UNet3DConditionModel", **ONE_LEVEL, cross_attention_dim=8, attention_head_dim=4,
                   down_block_types=("CrossAttnDownBlock3D",), up_block_types=("CrossAttnUpBlock3D",)),
        _latent_and_text(4, 4, frames=(2,)), skips=2),
    "UNetSpatioTemporalConditionModel": Network(
        _diffusers("UNetSpatioTemporalConditionModel", sample_size=4, in_channels=4, block_out_channels=(32,),
                   layers_per_block=1, cross_attention_dim=8, num_attention_heads=(2,),
                   addition_time_embed_dim=4, projection_class_embeddings_input_dim=12,
                   down_block_types=("CrossAttnDownBlockSpatioTemporal",),
                   up_block_types=("CrossAttnUpBlockSpatioTemporal",)),
        lambda: Call((torch.randn(1, 2, 4, 4, 4), T[:1], torch.randn(1, 1, 8), torch.ones(1, 3))),
        skips=2, checkpoint=_enable),
    "UNetMotionModel": Network(
        _diffusers("UNetMotionModel", **ONE_LEVEL, cross_attention_dim=8, num_attention_heads=2,
                   motion_num_attention_heads=2, down_block_types=("CrossAttnDownBlockMotion",),
                   up_block_types=("CrossAttnUpBlockMotion",)),
        lambda: Call((torch.randn(1, 4, 2, 4, 4), T[:1], torch.randn(2, 5, 8))), skips=2, checkpoint=_enable),
    "HunyuanDiT2DModel": Network(
        _diffusers("HunyuanDiT2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2,
                   sample_size=8, hidden_size=16, num_layers=8, mlp_ratio=2.0, cross_attention_dim=8,
                   cross_attention_dim_t5=8, pooled_projection_dim=8, text_len=3, text_len_t5=4,
                   use_style_cond_and_image_meta_size=False),
        _hunyuan_example, skips=3, middle="blocks.4", axis=-1, feels=True),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- the others


def _monai(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import monai.networks.nets as nets

        return getattr(nets, name)(**config)

    return build


def _uvit() -> nn.Module:
    from scalelong import UViT

    return UViT(img_size=8, patch_size=2, embed_dim=16, depth=6, num_heads=2, init_std=0.2)


def _use_checkpoint(net: nn.Module) -> None:
    for module in net.modules():
        if hasattr(module, "use_checkpoint"):
            module.use_checkpoint = True


def _stacked() -> nn.Module:
    from scalelong import StackedUNet

    return StackedUNet(width=8, num_skips=3, init="norm-preserving")


FEATURES = (4, 4, 8, 8, 8, 4)
OTHERS = {
    "scalelong.UViT": Network(_uvit, _image(3, 8, 8), skips=3, axis=-1, normed=False, feels=True, checkpoint=_enable),
    "original U-ViT": Network(OriginalUViT, _image(3, 8, 8), skips=3, axis=-1, normed=False, feels=True,
                              checkpoint=_use_checkpoint),
    "guided-diffusion": Network(GuidedUNet, _image(3, 8, 8), skips=4, middle="middle_block",
                                checkpoint=_use_checkpoint),
    "lucidrains Unet": Network(
        lambda: lucidrains().Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2),
        _image(3, 8, 8), skips=5, middle="mid_block2", normed=False, feels=True),
    "MONAI BasicUNet 2D": Network(
        _monai("BasicUNet", spatial_dims=2, in_channels=1, features=FEATURES),
        lambda: Call((torch.randn(2, 1, 32, 32),)), skips=4, middle="down_4", normed=False, feels=True),
    "MONAI BasicUNet 3D": Network(
        _monai("BasicUNet", spatial_dims=3, in_channels=1, features=FEATURES),
        lambda: Call((torch.randn(1, 1, 32, 16, 16),)), skips=4, middle="down_4", normed=False, feels=True),
    "MONAI DiffusionModelUNet": Network(
        _monai("DiffusionModelUNet", spatial_dims=2, in_channels=1, out_channels=1, num_res_blocks=1, channels=(8, 16),
               attention_levels=(False, True), norm_num_groups=4, num_head_channels=8),
        _image(1, 8, 8), skips=4, middle="middle_block"),
    "StackedUNet": Network(
        _stacked, lambda: Call((torch.randn(4, 8),)), skips=3, middle="middle", axis=-1, normed=False, feels=True),
}  # fmt: skip

NETWORKS = {**DIFFUSERS, **OTHERS}

# ------------------------------------------------- other blocks and sizes, for the count of their skips


def _unet2d(blocks: str, **config: Any) -> Callable[[], nn.Module]:
    kinds = {"down_block_types": (f"{blocks}DownBlock2D",) * 2, "up_block_types": (f"{blocks}UpBlock2D",) * 2}
    if blocks == "Resnet":
        kinds = {"down_block_types": ("ResnetDownsampleBlock2D",) * 2, "up_block_types": ("ResnetUpsampleBlock2D",) * 2}
    return _diffusers("UNet2DModel", **SMALL, **kinds, attention_head_dim=4, **config)


def _spade() -> nn.Module:
    from monai.networks.nets import SPADEDiffusionModelUNet

    return SPADEDiffusionModelUNet(
        spatial_dims=2, in_channels=1, out_channels=1, label_nc=2, num_res_blocks=1, channels=(8, 16),
        attention_levels=(False, False), norm_num_groups=4, spade_intermediate_channels=4,
    )  # fmt: skip


VARIANTS = {
    **{f"{blocks} blocks": Network(_unet2d(blocks), _image(3, 8, 8), skips=4) for blocks in ("Attn", "Resnet")},
    "Skip blocks (NCSN++)": Network(
        _diffusers("UNet2DModel", sample_size=16, block_out_channels=(32, 64, 64), layers_per_block=1,
                   time_embedding_type="fourier", attention_head_dim=8,
                   down_block_types=("SkipDownBlock2D", "AttnSkipDownBlock2D", "SkipDownBlock2D"),
                   up_block_types=("SkipUpBlock2D", "AttnSkipUpBlock2D", "SkipUpBlock2D")),
        _image(3, 16, 16), skips=6),
    "simple cross-attention (Kandinsky)": Network(
        _diffusers("UNet2DConditionModel", **SMALL, cross_attention_dim=8, attention_head_dim=4,
                   mid_block_type="UNetMidBlock2DSimpleCrossAttn",
                   down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
                   up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D")),
        _latent_and_text(8, 8), skips=4),
    "layers by block": Network(
        _diffusers("UNet2DConditionModel", **{**CROSS, "layers_per_block": (1, 2)}), _latent_and_text(8, 8), skips=5),
    "a residual trajectory U-Net": Network(
        _diffusers("UNet1DModel", in_channels=4, out_channels=4, block_out_channels=(32, 64, 64), layers_per_block=1,
                   down_block_types=("DownResnetBlock1D",) * 3, up_block_types=("UpResnetBlock1D",) * 2,
                   mid_block_type="MidResTemporalBlock1D", out_block_type="OutConv1DBlock", act_fn="mish",
                   time_embedding_type="positional", use_timestep_embedding=True, norm_num_groups=8),
        lambda: Call((torch.randn(2, 4, 16), T)), skips=2),
    "UNet3DConditionModel, two levels": Network(
        _diffusers("UNet3DConditionModel", **SMALL, cross_attention_dim=8, attention_head_dim=4,
                   down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                   up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        _latent_and_text(8, 8, frames=(2,)), skips=4),
    "UNetSpatioTemporalConditionModel, two levels": Network(
        _diffusers("UNetSpatioTemporalConditionModel", sample_size=8, in_channels=4, block_out_channels=(32, 64),
                   layers_per_block=1, cross_attention_dim=8, num_attention_heads=(2, 4),
                   addition_time_embed_dim=4, projection_class_embeddings_input_dim=12,
                   down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                   up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")),
        lambda: Call((torch.randn(2, 2, 4, 8, 8), T, torch.randn(2, 1, 8), torch.ones(2, 3))), skips=4),
    "UNetMotionModel, two levels": Network(
        _diffusers("UNetMotionModel", **SMALL, cross_attention_dim=8, num_attention_heads=2,
                   motion_num_attention_heads=2, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
                   up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion")),
        lambda: Call((torch.randn(2, 4, 2, 8, 8), T, torch.randn(2 * 2, 5, 8))), skips=4),
    "I2VGenXLUNet": Network(
        _diffusers("I2VGenXLUNet", **SMALL, cross_attention_dim=8, attention_head_dim=4,
                   down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                   up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        lambda: Call((torch.randn(1, 4, 2, 8, 8), torch.tensor([3]), torch.tensor([8]), torch.randn(1, 4, 2, 8, 8),
                      torch.randn(1, 8)), {"encoder_hidden_states": torch.randn(1, 5, 8)}), skips=4),
    "lucidrains Unet1D": Network(
        lambda: lucidrains().Unet1D(dim=8, dim_mults=(1, 2), channels=2),
        lambda: Call((torch.randn(2, 2, 16), T)), skips=5, middle="mid_block2"),
    "lucidrains Unet, self-conditioned": Network(
        lambda: lucidrains().Unet(dim=8, dim_mults=(1, 2, 2), self_condition=True, full_attn=(True, False, False),
                                  attn_dim_head=4, attn_heads=2),
        _image(3, 8, 8), skips=7, middle="mid_block2"),
    "guided-diffusion, three levels": Network(
        lambda: GuidedUNet(num_res_blocks=2, channel_mult=(1, 2, 2)), _image(3, 8, 8), skips=9, middle="middle_block"),
    "MONAI DiffusionModelUNet, residual, 3D": Network(
        _monai("DiffusionModelUNet", spatial_dims=3, in_channels=1, out_channels=1, num_res_blocks=(1, 2),
               channels=(8, 16), attention_levels=(False, False), norm_num_groups=4, resblock_updown=True),
        _image(1, 8, 8, 8), skips=5, middle="middle_block"),
    "MONAI SPADEDiffusionModelUNet": Network(
        _spade, lambda: Call((torch.randn(2, 1, 8, 8), T), {"seg": torch.randn(2, 2, 8, 8)}), skips=4,
        middle="middle_block"),
}  # fmt: skip
