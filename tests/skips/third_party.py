"""Third-party networks, tiny, with an independent reference: κ multiplied in at the joins, read off their source.

A join is a piece of a source line and the operand that is the skip. Every concatenation or addition on such a line is a
join; the first of a pass is long skip N, the last is long skip 1. `python tests/skips/networks_page.py` records the
results and writes docs/networks.md.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import linecache
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import layouts
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peers import FOLDERS, lucidrains, network_packages

JOINING = ("cat", "concat", "add", "add_", "lerp")
T = torch.tensor([3, 400])
U = torch.tensor([0.3, 0.7])


@dataclass(frozen=True)
class ThirdParty:
    """package: its distribution; build, example: the network and its arguments; joins: pieces of lines and operands."""

    package: str
    build: Callable[[], nn.Module]
    example: Callable[[], tuple[Any, ...]]  # a dictionary at the end holds keyword arguments
    joins: tuple[tuple[str, int], ...]
    found: str = "structure"
    slow: bool = False

    def make(self) -> nn.Module:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of while they are built is not what is tested here
            torch.manual_seed(0)
            net = self.build().eval()
            for parameter in net.parameters():  # layers and gains that start at zero would hide everything
                if parameter.ndim != 1 and not parameter.any():
                    nn.init.normal_(parameter, std=0.2) if parameter.ndim else nn.init.ones_(parameter)
        return net

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            args = self.example()
        return (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})

    @torch.no_grad()
    def run(self, net: nn.Module, kappas: list[float] | None = None, mode: Reference | None = None) -> Tensor:
        args, kwargs = copy.deepcopy(self.call())
        with torch.random.fork_rng(), mode or torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(2)
            out = net(*args, **kwargs)
        while not isinstance(out, Tensor):
            out = out[0]
        return out

    def count(self) -> int:
        watch = Reference(self.joins)
        self.run(self.make(), mode=watch)
        return watch.count

    def by_hand(self, kappas: list[float]) -> Tensor:
        """The unscaled network's output with κ_1 … κ_N multiplied in."""
        reference = Reference(self.joins, kappas[::-1])
        out = self.run(self.make(), mode=reference)
        assert reference.count == len(kappas)
        return out

    @property
    def version(self) -> str:
        where = [*sys.path, *map(str, FOLDERS)]
        found = importlib.metadata.distributions(name=self.package, path=where)
        return next((distribution.version for distribution in found), "")


class Reference(TorchFunctionMode):
    """Multiplies the skip's operand of every join by κ, in the order of the pass; counts the joins."""

    def __init__(self, joins: tuple[tuple[str, int], ...], kappas: list[float] | None = None) -> None:
        super().__init__()
        self.joins, self.kappas, self.count = joins, kappas, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in JOINING and args:
            listed = isinstance(args[0], (list, tuple))
            operands, frame = list(args[0] if listed else args), sys._getframe(1)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            k = next((operand for piece, operand in self.joins if piece in line), None)
            tensors = all(isinstance(x, Tensor) for x in operands[:2])
            if k is not None and tensors and operands[0].any() and operands[k].numel():
                if self.kappas is not None:
                    operands[k] = operands[k] * self.kappas[self.count]
                self.count += 1
                args = (operands, *args[1:]) if listed else tuple(operands)
        return func(*args, **kwargs)


def _from(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(module), name)(*args, **kwargs)


def _lucid(module: str, name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        lucidrains()
        return getattr(importlib.import_module(f"denoising_diffusion_pytorch.{module}"), name)(**kwargs)

    return build


def _x(*shape: int, rest: tuple[Any, ...] = ()) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape), *rest)


def _controlnet_xs() -> nn.Module:
    import diffusers

    base = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=2, norm_num_groups=4, sample_size=8, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8, use_linear_projection=True)  # fmt: skip
    control = diffusers.ControlNetXSAdapter.from_unet(base, size_ratio=0.5, conditioning_embedding_out_channels=(8, 8))
    return diffusers.UNetControlNetXSModel.from_unet(base, control)


def _apart(nested: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, nested))


CASCADE = _apart([["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]] * 3)
KARRAS = {"dim": 16, "dim_max": 32, "channels": 3, "num_downsamples": 2, "num_blocks_per_stage": 2, "attn_dim_head": 8,
          "fourier_dim": 8, "dropout": 0.0}  # fmt: skip
H_POP = (("torch.cat((x, h.pop()), dim = 1)", 1), ("torch.cat((x, r), dim = 1)", 1))
MP_CAT = (("C * torch.cat((a, b)", 1),)
NETS, D = "monai.networks.nets", "denoising-diffusion-pytorch"
SKIP_FIRST = (("torch.cat([x, y], dim=self.dim)", 0),)
OUT_SKIP = (("out = torch.cat((out, skip), dim=1)", 1),)
X_E = (("torch.cat([x_e, x_0]", 0),)
HS, SKIPS = (("torch.cat([h, hs.pop()]", 1),), (("torch.cat([x, skips.pop()]", 1),)
LAYOUT = _x(2, 3, 8, 8, rest=(T,))

THIRD_PARTY = {
    "Kandinsky3UNet": ThirdParty(
        "diffusers", _from("diffusers", "Kandinsky3UNet", in_channels=4, time_embedding_dim=32, groups=4,
                           attention_head_dim=8, layers_per_block=2, block_out_channels=(16, 32, 32),
                           cross_attention_dim=16, encoder_hid_dim=16),
        lambda: (torch.randn(2, 4, 8, 8), T, {"encoder_hidden_states": torch.randn(2, 5, 16),
                                              "encoder_attention_mask": torch.ones(2, 5)}),
        (("torch.cat([sample, hidden_states.pop()]", 1),)),
    "StableCascadeUNet": ThirdParty(
        "diffusers", _from("diffusers.models", "StableCascadeUNet", in_channels=4, out_channels=4,
                           timestep_ratio_embedding_dim=8, patch_size=1, conditioning_dim=16, self_attn=True,
                           block_out_channels=(16, 16, 16), num_attention_heads=(2, 2, 2), kernel_size=3, clip_seq=2,
                           down_num_layers_per_block=(1, 2, 1), up_num_layers_per_block=(1, 2, 1),
                           down_blocks_repeat_mappers=(1, 1, 1), up_blocks_repeat_mappers=(1, 1, 1),
                           block_types_per_layer=CASCADE, clip_text_in_channels=8, clip_text_pooled_in_channels=8,
                           clip_image_in_channels=8, dropout=(0.0, 0.0, 0.0), switch_level=(False, True)),
        lambda: (torch.randn(2, 4, 8, 8), U, torch.randn(2, 1, 8), {"clip_text": torch.randn(2, 3, 8),
                                                                   "clip_img": torch.randn(2, 1, 8)}),
        (("torch.cat([x, x_skip]", 1),)),
    "UNetControlNetXSModel": ThirdParty(
        "diffusers", _controlnet_xs,
        lambda: (torch.randn(2, 4, 8, 8), T, torch.randn(2, 5, 8), torch.randn(2, 3, 16, 16)),
        (("torch.cat([hidden_states, res_h_base]", 1),)),
    "UniDiffuserModel": ThirdParty(
        "diffusers", _from("diffusers.pipelines.deprecated.unidiffuser.modeling_uvit", "UniDiffuserModel", text_dim=16,
                           clip_img_dim=16, num_text_tokens=5, num_attention_heads=2, attention_head_dim=8,
                           in_channels=4, out_channels=4, num_layers=5, sample_size=8, patch_size=2, norm_num_groups=1,
                           use_timestep_embedding=False),
        lambda: (torch.randn(2, 4, 8, 8), torch.randn(2, 1, 16), torch.randn(2, 5, 16), T[:1], T[:1]),
        (("self.skip_linear(torch.cat([x, skip]", 1),), found="example"),
    "lucidrains Unet, classifier-free guidance": ThirdParty(
        D, _lucid("classifier_free_guidance", "Unet", dim=8, num_classes=4, dim_mults=(1, 2), attn_dim_head=4,
                  attn_heads=2),
        lambda: (torch.randn(2, 3, 8, 8), T, torch.tensor([0, 1]), {"cond_drop_prob": 0.0}), H_POP),
    "KarrasUnet": ThirdParty(D, _lucid("karras_unet", "KarrasUnet", image_size=16, attn_res=(8,), **KARRAS),
                             _x(2, 3, 16, 16, rest=(U,)), MP_CAT),
    "KarrasUnet1D": ThirdParty(D, _lucid("karras_unet_1d", "KarrasUnet1D", seq_len=16, attn_res=(8,), **KARRAS),
                               _x(2, 3, 16, rest=(U,)), MP_CAT),
    "KarrasUnet3D": ThirdParty(
        D, _lucid("karras_unet_3d", "KarrasUnet3D", image_size=8, frames=4, attn_res=(4,), **KARRAS),
        _x(2, 3, 4, 8, 8, rest=(U,)), MP_CAT),
    "simple-diffusion UViT": ThirdParty(
        D, _lucid("simple_diffusion", "UViT", dim=8, dim_mults=(1, 2), vit_depth=2, attn_dim_head=4, attn_heads=2),
        _x(2, 3, 16, 16, rest=(U,)), H_POP),
    "MONAI UNet": ThirdParty(
        "monai", _from(NETS, "UNet", spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16),
                       strides=(2, 2)), _x(2, 1, 16, 16), SKIP_FIRST),
    "MONAI UNet, residual, 3D": ThirdParty(
        "monai", _from(NETS, "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16, 16),
                       strides=(2, 2, 2), num_res_units=2), _x(1, 1, 16, 16, 16), SKIP_FIRST),
    "MONAI AttentionUnet": ThirdParty(
        "monai", _from(NETS, "AttentionUnet", spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16),
                       strides=(2, 2)), _x(2, 1, 16, 16), (("self.merge(torch.cat((att, fromlower)", 0),)),
    "MONAI DynUNet": ThirdParty(
        "monai", _from(NETS, "DynUNet", spatial_dims=2, in_channels=1, out_channels=2, kernel_size=[3, 3, 3],
                       strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 16]), _x(2, 1, 16, 16), OUT_SKIP),
    "MONAI UNETR": ThirdParty(
        "monai", _from(NETS, "UNETR", in_channels=1, out_channels=2, img_size=(32, 32), feature_size=4, hidden_size=16,
                       mlp_dim=32, num_heads=2, spatial_dims=2), _x(2, 1, 32, 32), OUT_SKIP),
    "MONAI SwinUNETR": ThirdParty(
        "monai", _from(NETS, "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1),
                       spatial_dims=2), _x(2, 1, 64, 64), OUT_SKIP),
    "MONAI VNet": ThirdParty("monai", _from(NETS, "VNet", spatial_dims=2, in_channels=1, out_channels=2),
                             _x(1, 1, 32, 32), (("xcat = torch.cat((out, skipxdo)", 1),)),
    "MONAI FlexibleUNet": ThirdParty(
        "monai", _from(NETS, "FlexibleUNet", in_channels=3, out_channels=2, backbone="resnet18", spatial_dims=2,
                       decoder_channels=(16, 16, 8, 8, 4)), _x(1, 3, 32, 32), X_E, found="example"),
    "MONAI SegResNet": ThirdParty("monai", _from(NETS, "SegResNet", spatial_dims=2, init_filters=8),
                                  _x(2, 1, 16, 16), (("x = up(x) + down_x[i + 1]", 1),), found="example"),
    "MONAI MedNeXt": ThirdParty(
        "monai", _from(NETS, "MedNeXt", spatial_dims=2, init_filters=4, kernel_size=3, blocks_down=(1, 1),
                       blocks_bottleneck=1, blocks_up=(1, 1)),
        _x(2, 1, 32, 32), (("x = x + enc_outputs[-(i + 1)]", 1),), found="example"),
    "layout of EDM and CorrDiff (enc, dec)": ThirdParty("layout", layouts.DictUNet, LAYOUT, SKIPS),
    "layout of ddim and latent-diffusion Model": ThirdParty("layout", layouts.LevelUNet, LAYOUT, HS),
    "layout of U-DiT, DiCo, FCDM": ThirdParty("layout", layouts.ReducedUNet, LAYOUT, (("self.reduce_chan_level", 1),)),
    "layout of DiC, sparse skips": ThirdParty("layout", layouts.SparseUNet, LAYOUT, SKIPS),
    "layout of k-diffusion's first U-Net": ThirdParty(
        "layout", layouts.MirroredUNet, LAYOUT, (("torch.cat([x, skip]", 1),)),
    "layout of k-diffusion's first U-Net, skip_stages": ThirdParty(
        "layout", lambda: layouts.MirroredUNet(1), LAYOUT, (("torch.cat([x, skip]", 1),)),
}  # fmt: skip

# ------------------------------------------------------- packages of requirements-networks.txt (make test-slow)

IMAGEN = {"dim": 8, "text_embed_dim": 8, "cond_dim": 8, "dim_mults": (1, 2), "attn_dim_head": 4, "attn_heads": 2,
          "num_resnet_blocks": 1, "attn_pool_num_latents": 2, "layer_attns": (False, True),
          "layer_cross_attns": (False, True)}  # fmt: skip
HIDDENS = (("torch.cat((x, hiddens.pop() * self.skip_connect_scale)", 1), ("torch.cat((x, init_conv_residual)", 1))
XUNET = {"dim": 8, "channels": 3, "dim_mults": (1, 2), "num_blocks_per_stage": (1, 1),
         "num_self_attn_per_stage": (0, 1), "nested_unet_depths": (0, 0), "attn_heads": 2,
         "attn_dim_head": 4}  # fmt: skip
X_HIDDENS = (("torch.cat((x, down_hiddens.pop()", 1), ("torch.cat((x, r), dim = 1)", 1))
RESNET = {"encoder_name": "resnet18", "encoder_weights": None, "encoder_depth": 4}
NNUNET = {"input_channels": 1, "n_stages": 3, "features_per_stage": (4, 8, 16), "kernel_sizes": 3, "conv_bias": True,
          "strides": (1, 2, 2), "num_classes": 2, "n_conv_per_stage_decoder": 1, "norm_op_kwargs": {"affine": True},
          "nonlin": nn.LeakyReLU}  # fmt: skip
SMP, NN, VIDEO = "segmentation-models-pytorch", "dynamic-network-architectures", "video-diffusion-pytorch"
FEATURES = (("torch.cat([feature_map, skip_connection]", 1),)
STAGES = (("torch.cat((x, skips[-(s+2)])", 1),)
PLUS = (("x = x + skip", 1),)


NAF = {"width": 8, "middle_blk_num": 1}
ENC_SKIP, SUMS = (("x = x + enc_skip", 1),), tuple((f"x + x{k}", 1) for k in range(1, 5))


def _text(*size: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(2, 3, *size), U, {"text_embeds": torch.randn(2, 4, 8)})


def _slow(package: str, build: Any, example: Any, joins: Any, found: str = "structure") -> ThirdParty:
    def installed() -> nn.Module:
        network_packages()
        return build()

    return ThirdParty(package, installed, example, joins, found, slow=True)


def _spandrel(module: str, name: str, example: Any, joins: Any, **settings: Any) -> ThirdParty:
    """Image restoration, as spandrel collects it."""
    return _slow("spandrel", _from(f"spandrel.architectures.{module}", name, **settings), example, joins, "example")


THIRD_PARTY |= {
    "imagen Unet": _slow("imagen-pytorch", _from("imagen_pytorch", "Unet", **IMAGEN), _text(8, 8), HIDDENS),
    "imagen Unet, memory efficient": _slow(
        "imagen-pytorch", _from("imagen_pytorch", "Unet", **{**IMAGEN, "num_resnet_blocks": 2}, memory_efficient=True,
                                init_conv_to_final_conv_residual=True), _text(8, 8), HIDDENS),
    "imagen Unet3D": _slow("imagen-pytorch", _from("imagen_pytorch", "Unet3D", **IMAGEN), _text(2, 8, 8), HIDDENS),
    "video-diffusion Unet3D": _slow(
        VIDEO, _from("video_diffusion_pytorch", "Unet3D", dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=16),
        _x(1, 3, 2, 16, 16, rest=(T[:1],)), H_POP),
    "x-unet XUnet": _slow("x-unet", _from("x_unet", "XUnet", **XUNET), _x(1, 3, 16, 16), X_HIDDENS),
    "x-unet XUnet, 3D": _slow(
        "x-unet", _from("x_unet", "XUnet", **XUNET, frame_kernel_size=3, use_convnext=True), _x(1, 3, 2, 16, 16),
        X_HIDDENS),
    "segmentation-models Unet": _slow(
        SMP, _from("segmentation_models_pytorch", "Unet", **RESNET, decoder_channels=(32, 16, 8, 8)), _x(2, 3, 32, 32),
        FEATURES),
    "segmentation-models Unet, scse": _slow(
        SMP, _from("segmentation_models_pytorch", "Unet", **RESNET, decoder_channels=(32, 16, 16, 16),
                   decoder_attention_type="scse"), _x(2, 3, 32, 32), FEATURES),
    "segmentation-models Linknet": _slow(
        SMP, _from("segmentation_models_pytorch", "Linknet", **RESNET), _x(2, 3, 32, 32), PLUS),
    "segmentation-models MAnet": _slow(
        SMP, _from("segmentation_models_pytorch", "MAnet", **RESNET, decoder_channels=(32, 16, 16, 16)),
        _x(2, 3, 32, 32), (("x = torch.cat([x, skip], dim=1)", 1),), found="example"),
    "segmentation-models Unet, Mix Transformer": _slow(
        SMP, _from("segmentation_models_pytorch", "Unet", "mit_b0", encoder_weights=None), _x(1, 3, 64, 64), FEATURES),
    "nnU-Net PlainConvUNet": _slow(
        NN, _from("dynamic_network_architectures.architectures.unet", "PlainConvUNet", **NNUNET, conv_op=nn.Conv2d,
                  norm_op=nn.InstanceNorm2d, n_conv_per_stage=1), _x(2, 1, 16, 16), STAGES),
    "nnU-Net ResidualEncoderUNet, 3D": _slow(
        NN, _from("dynamic_network_architectures.architectures.unet", "ResidualEncoderUNet", **NNUNET,
                  conv_op=nn.Conv3d, norm_op=nn.InstanceNorm3d, n_blocks_per_stage=1), _x(1, 1, 16, 16, 16), STAGES),
    "HDemucs": _slow("demucs", _from("demucs.hdemucs", "HDemucs", ["a", "b"], channels=8, dconv_mode=0),
                     _x(1, 2, 16384), PLUS),
    "HDemucs, spectral": _slow(
        "demucs", _from("demucs.hdemucs", "HDemucs", ["a", "b"], channels=8, dconv_mode=0, hybrid=False),
        _x(1, 2, 16384), PLUS),
    "HTDemucs": _slow(
        "demucs", _from("demucs.htdemucs", "HTDemucs", ["a", "b"], channels=8, dconv_mode=0, t_layers=1, t_heads=2,
                        segment=0.4), _x(1, 2, 17640), PLUS),
    "unet UNet2D": _slow(
        "unet", _from("unet", "UNet2D", in_channels=1, out_channels_first_layer=4, num_encoding_blocks=3, padding=1),
        _x(2, 1, 16, 16), (("torch.cat((skip_connection, x)", 0),), found="example"),
    "unet UNet3D, cropped skips": _slow(
        "unet", _from("unet", "UNet3D", in_channels=1, out_channels_first_layer=4, num_encoding_blocks=2),
        _x(1, 1, 20, 20, 20), (("torch.cat((skip_connection, x)", 0),), found="example"),
    "NAFNet": _spandrel("NAFNet.__arch.NAFNet_arch", "NAFNet", _x(1, 3, 32, 32), ENC_SKIP, **NAF,
                        enc_blk_nums=[1, 1, 1], dec_blk_nums=[1, 1, 1]),
    "KBNet_s": _spandrel("KBNet.__arch.kbnet_s", "KBNet_s", _x(1, 3, 32, 32), ENC_SKIP, **NAF, enc_blk_nums=[1, 1],
                         dec_blk_nums=[1, 1]),
    "FFTformer": _spandrel(
        "FFTformer.__arch.fftformer_arch", "FFTformer", _x(1, 3, 32, 32), (("torch.cat((enc, dnc)", 1),), dim=8,
        num_blocks=[1, 1, 1], num_refinement_blocks=1),
    "Uformer": _spandrel(
        "Uformer.__arch.Uformer", "Uformer", _x(1, 3, 128, 128), tuple((f", conv{k}], -1)", 1) for k in range(4)),
        img_size=128, embed_dim=8, depths=[1] * 9, win_size=8),
    "FBCNN": _spandrel("FBCNN.__arch.FBCNN", "FBCNN", _x(1, 3, 16, 16), SUMS, nc=[64, 128, 256, 512], nb=1),
    "DRUNet": _spandrel("DRUNet.__arch.network_unet", "DRUNet", _x(1, 4, 32, 32), SUMS, in_nc=4, nc=[8, 16, 24, 32],
                        nb=1),
    "SCUNet": _spandrel("SCUNet.__arch.SCUNet", "SCUNet", _x(1, 3, 64, 64), SUMS, config=[1] * 7, dim=64),
    "MixDehazeNet": _spandrel(
        "MixDehazeNet.__arch.MixDehazeNet", "MixDehazeNet", _x(1, 3, 64, 64), (("torch.cat(in_feats", 1),),
        embed_dims=[8, 16, 32, 16, 8], depths=[1] * 5),
    "unet3d UNet3d": _slow("unet3d", _from("unet3d.unet3d", "UNet3d", c_start=4, layers=3), _x(1, 1, 16, 16, 16),
                           (("torch.cat([x2, x1]", 0),), found="example"),
}  # fmt: skip
