"""U-ViT (Bao et al., 2023): a vision transformer with long skips. Parameter names match the original code.

Unconditional, class-conditional (`num_classes`) or text-conditional (`clip_dim`, `num_clip_token`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.errors import InvalidValueError, invalid, require

require("diffusers", extra="train", purpose="UViT (a diffusers model)")

from diffusers import ConfigMixin, ModelMixin  # noqa: E402
from diffusers.configuration_utils import FrozenDict  # noqa: E402

from scalelong._modules import aligned  # noqa: E402
from scalelong.models.official import load_official  # noqa: E402
from scalelong.models.prediction import Prediction, as_prediction  # noqa: E402
from scalelong.scaling import Scaling, parse_scaling  # noqa: E402
from scalelong.skips import Site, apply, scale_skip  # noqa: E402
from scalelong.skips.conditioning import enter_block, leave_block  # noqa: E402


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Return sinusoids of t, cosines first: (B,) → (B, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies[None]  # (B, half)
    embedding = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return F.pad(embedding, (0, 1)) if width % 2 else embedding


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, num_heads: int, qkv_bias: bool, base_head_width: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        # μP: ∝ 1/d, and 1/√d at the base width of a head; None is torch's own 1/√d
        self.scale = None if base_head_width is None else base_head_width**0.5 / (width // num_heads)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        qkv = self.qkv(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, L, D / heads) each
        x = F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2)
        return self.proj(x.reshape(B, L, D))


class Block(nn.Module):
    """A pre-norm transformer block. With `skip=True` it first joins a long skip: Linear([x, skip])."""

    def __init__(
        self, width: int, num_heads: int, mlp_ratio: float, qkv_bias: bool,
        base_head_width: int | None = None, skip: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads, qkv_bias, base_head_width)
        self.norm2 = nn.LayerNorm(width)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, width))  # the exact GELU
        )
        self.skip_linear = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            assert skip is not None
            x = self.skip_linear(torch.cat([x, skip], dim=-1))  # (B, L, D)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class UViT(ModelMixin, ConfigMixin):
    """Predict the noise: `eps = model(x, t)`, `model(x, t, y=labels)` or `model(x, t, context=text_tokens)`.

    x is (B, in_chans, img_size, img_size). t, a number or (B,), is the timestep, from 0 (the clean image) to 1000
    (noise). It may be fractional: networks trained on the VP-SDE receive 999·t for t in [0, 1]. The result is a tensor,
    and also its own `.sample`, so diffusers' `DDIMPipeline` and `DDPMPipeline` accept this network.

    Args:
        img_size: Side of the images, (B, in_chans, img_size, img_size).
        patch_size: Side of the square patches they are cut into.
        in_chans: Channels of the images.
        embed_dim: Width of a token.
        depth: depth//2 encoder blocks, one middle block and depth//2 decoder blocks, so N = depth//2 long skips.
        num_heads: Attention heads per block.
        mlp_ratio: Width of a block's MLP over embed_dim.
        qkv_bias: Whether queries, keys and values have biases.
        mlp_time_embed: Whether an MLP follows the timestep's sinusoids.
        num_classes: Rows of the label table, the null label included. None or 0 for no classes.
        clip_dim: Width of text tokens. None or 0 for no text.
        num_clip_token: Number of text tokens. None or 0 for no text.
        conv: Whether a 3×3 convolution ends the network.
        init_std: Standard deviation of linear weights and of the position table.
        base_head_width: Head width d at which attention is scaled by 1/√d; others use √base_head_width / d, as μP asks
            where heads grow with the network. None: 1/√d.
        scaling: Spec or name of a scaling. Equivalent to `scalelong.apply(UViT(…), scaling)`.

    Examples:
        >>> net = scalelong.UViT(img_size=8, patch_size=4, embed_dim=16, depth=4, num_heads=2, scaling="cs:0.5")
        >>> x, t = torch.randn(2, 3, 8, 8), torch.tensor([10.0, 500.0])
        >>> net(x, t).shape
        torch.Size([2, 3, 8, 8])
        >>> net.save_pretrained("network")
        >>> loaded = scalelong.UViT.from_pretrained("network")
        >>> loaded.config["scaling"], torch.equal(loaded(x, t), net.eval()(x, t))
        ({'kind': 'cs', 'kappa': 0.5, 'reverse': False}, True)
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (diffusers reads a list)

    def __init__(
        self,
        img_size: int = 32,
        patch_size: int = 2,
        in_chans: int = 3,
        embed_dim: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        mlp_time_embed: bool = False,
        num_classes: int | None = None,
        clip_dim: int | None = None,
        num_clip_token: int | None = None,
        conv: bool = True,
        init_std: float = 0.02,
        scaling: Scaling | str | dict[str, Any] | None = None,
        base_head_width: int | None = None,
    ) -> None:
        num_classes, clip_dim, num_clip_token = num_classes or None, clip_dim or None, num_clip_token or None
        spec = parse_scaling(scaling)
        config = {k: v for k, v in locals().items() if k not in ("self", "spec", "__class__")}
        _check_config(config)
        super().__init__()
        self.register_to_config(**config | {"scaling": spec.to_dict()})

        self.img_size, self.patch_size, self.in_chans = img_size, patch_size, in_chans
        self.num_classes, self.clip_dim, self.num_clip_token = num_classes, clip_dim, num_clip_token
        self.extras = 1 + (1 if num_classes else 0) + (num_clip_token or 0)  # time, label or text tokens
        self.time_token = 1 if num_classes else 0  # its position
        self.patches = (img_size // patch_size) ** 2
        self.gradient_checkpointing = False
        D, L, N = embed_dim, self.extras + self.patches, depth // 2
        self.long_skips = tuple(  # outermost first: scale_skip scales them in `forward`
            Site(
                f"out_blocks.{N - i}",
                channels=D,
                dim=-1,
                tokens=L,
                source=f"in_blocks.{i - 1}",
                backbone=D,
                extras=self.extras,
                op="cat",
            )
            for i in range(1, N + 1)
        )

        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(in_chans, D, patch_size, stride=patch_size)))
        self.time_embed = (
            nn.Sequential(nn.Linear(D, 4 * D), nn.SiLU(), nn.Linear(4 * D, D)) if mlp_time_embed else nn.Identity()
        )
        if num_classes:
            self.label_emb = nn.Embedding(num_classes, D)
        if clip_dim:
            self.context_embed = nn.Linear(clip_dim, D)
        self.pos_embed = nn.Parameter(torch.zeros(1, L, D))
        block: dict[str, Any] = {
            "width": D, "num_heads": num_heads, "mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias,
            "base_head_width": base_head_width,
        }  # fmt: skip
        self.in_blocks = nn.ModuleList(Block(**block) for _ in range(N))
        self.mid_block = Block(**block)
        self.out_blocks = nn.ModuleList(Block(**block, skip=True) for _ in range(N))
        self.norm = nn.LayerNorm(D)
        self.decoder_pred = nn.Linear(D, patch_size**2 * in_chans)
        self.final_layer = nn.Conv2d(in_chans, in_chans, 3, padding=1) if conv else nn.Identity()
        nn.init.trunc_normal_(self.pos_embed, std=init_std)
        for module in self.modules():  # all but linear layers keep PyTorch's initialization
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        apply(self, spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Prediction:
        return as_prediction(super().__call__(*args, **kwargs))

    @property
    def config(self) -> Any:
        """The arguments of the constructor; `sample_size` and `in_channels` are diffusers' names of two of them."""
        config = self._internal_dict
        return FrozenDict({**config, "sample_size": config["img_size"], "in_channels": config["in_chans"]})

    def forward(self, x: Tensor, t: Tensor | float, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Predict the noise in x.

        Args:
            x: Images, (B, in_chans, img_size, img_size).
            t: Timestep, from 0 to 1000, a number or (B,).
            y: Labels, (B,), of a network with classes.
            context: Text tokens, (B, num_clip_token, clip_dim), of a network with text.

        Returns:
            The noise, shaped like x.

        Examples:
            >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2, num_classes=11)
            >>> net(torch.randn(2, 3, 8, 8), 500, y=torch.tensor([3, 10])).shape
            torch.Size([2, 3, 8, 8])
        """
        self._check_inputs(x, y, context)
        B, _, H, W = x.shape
        t = torch.as_tensor(t, device=x.device).expand(B)
        x = self.patch_embed(x).flatten(2).transpose(1, 2)  # (B, patches, D)
        time = self.time_embed(timestep_embedding(t, x.shape[-1]).to(x.dtype))  # (B, D)
        tokens = [time[:, None], x]
        if y is not None:
            tokens = [self.label_emb(y)[:, None].to(x.dtype), time[:, None], x]
        if context is not None:
            tokens = [time[:, None], self.context_embed(context).to(x.dtype), x]
        x = torch.cat(tokens, dim=1) + self.pos_embed  # (B, L, D), L = extras + patches

        skips = []
        for k, block in enumerate(self.in_blocks):
            x = leave_block(self, f"in_blocks.{k}", self._run(block, x))
            skips.append(x)  # x_1, …, x_N
        x = leave_block(self, "mid_block", self._run(self.mid_block, x))
        for k, block in enumerate(self.out_blocks):
            i = len(skips)  # N, …, 1
            skip, x = scale_skip(self, skips.pop(), i, x)  # κ_i·x_i
            x = self._run(block, enter_block(self, f"out_blocks.{k}", x), skip)  # (B, L, D)
            leave_block(self, f"out_blocks.{k}", x)

        x = self.decoder_pred(self.norm(x))[:, self.extras :]  # (B, patches, p·p·C)
        p, C = self.patch_size, self.in_chans
        x = x.reshape(B, H // p, W // p, p, p, C)  # (row, column, channel) within a patch
        return self.final_layer(x.permute(0, 5, 1, 3, 2, 4).reshape(B, C, H, W))

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *inputs)
        return block(*inputs)

    def _check_inputs(self, x: Tensor, y: Tensor | None, context: Tensor | None) -> None:
        size = self.img_size
        if x.ndim != 4 or x.shape[1:] != (self.in_chans, size, size):
            raise invalid("shape of x", f"(batch, {self.in_chans}, {size}, {size})", tuple(x.shape))
        if (y is None) == bool(self.num_classes):
            expected = f"labels (num_classes={self.num_classes})" if self.num_classes else "None (no classes)"
            raise invalid("y", expected, type(y).__name__)
        if (context is None) == bool(self.clip_dim):
            expected = f"text tokens (clip_dim={self.clip_dim})" if self.clip_dim else "None (no text)"
            raise invalid("context", expected, type(context).__name__)
        n = x.shape[0]  # not len(x), which would fix the batch size of an exported network
        shapes = {"y": (y, (n,)), "context": (context, (n, self.num_clip_token, self.clip_dim))}
        for name, (value, shape) in shapes.items():
            if value is not None and value.shape != shape:
                raise invalid(f"shape of {name}", str(shape), tuple(value.shape))

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> UViT:
        """Load a folder written by `save_pretrained`, including the scaling.

        Args:
            *args: The folder, or a name on the Hugging Face hub.
            **kwargs: Options of diffusers' `ModelMixin.from_pretrained`. Weights are read from safetensors only.

        Returns:
            The network, in eval mode.
        """
        return aligned(super().from_pretrained(*args, **{**kwargs, "use_safetensors": True}))  # never a pickle

    @classmethod
    def from_official(
        cls,
        path_or_state_dict: str | Path | dict[str, Tensor],
        *,
        img_size: int,
        num_heads: int,
        scaling: Scaling | str | dict[str, Any] | None = None,
    ) -> UViT:
        """Load weights published by U-ViT or ScaleLong (`.pth` or safetensors). Their shapes determine all other sizes.

        Args:
            path_or_state_dict: The file or its state dict.
            img_size: Side of the images.
            num_heads: Attention heads per block.
            scaling: None selects LS if its weights (`se.*`) are present, and no scaling otherwise.

        Returns:
            The network.

        Examples:
            >>> weights = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2).state_dict()
            >>> net = scalelong.UViT.from_official(weights, img_size=8, num_heads=2, scaling="cs:0.7")
            >>> scalelong.describe(net).scaling
            ConstantScaling(kappa=0.7, reverse=False)
        """
        return load_official(cls, path_or_state_dict, img_size=img_size, num_heads=num_heads, scaling=scaling)


def _check_config(config: dict[str, Any]) -> None:
    for name in ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads"):
        value, least = config[name], 2 if name == "depth" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise invalid(name, f"an integer >= {least}", value)
    for name in ("mlp_ratio", "init_std"):
        if not isinstance(config[name], (int, float)) or not config[name] > 0:
            raise invalid(name, "a number > 0", config[name])
    head = config["base_head_width"]
    if head is not None and (isinstance(head, bool) or not isinstance(head, int) or head < 1):
        raise invalid("base_head_width", "None or an integer >= 1", head)
    for name, divisor in (("img_size", "patch_size"), ("embed_dim", "num_heads")):
        if config[name] % config[divisor]:
            raise invalid(name, f"divisible by {divisor}={config[divisor]}", config[name])
    if not 1 <= config["embed_dim"] * config["mlp_ratio"] < 2**31:
        raise invalid("mlp_ratio", f"at least 1/embed_dim = 1/{config['embed_dim']} and finite", config["mlp_ratio"])
    if config["num_classes"] and config["clip_dim"]:
        raise InvalidValueError("num_classes and clip_dim exclude each other; a U-ViT takes classes or text")
    text = config["clip_dim"], config["num_clip_token"]
    if any(text) != all(text):
        raise invalid("clip_dim and num_clip_token", "both set or both None", text)
