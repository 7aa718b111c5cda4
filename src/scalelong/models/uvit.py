"""U-ViT (Bao et al., 2023): a vision transformer with long skips, whose parameters are named as in the original.

Unconditional, class-conditional (`num_classes`) and text-conditional (`clip_dim`, `num_clip_token`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.errors import ScaleLongError, require

require("diffusers", extra="train", purpose="UViT (a diffusers model)")

from diffusers import ConfigMixin, ModelMixin  # noqa: E402

from scalelong.scaling import Scaling, parse_scaling  # noqa: E402
from scalelong.skips import Site, apply, scale_skip  # noqa: E402


def timestep_embedding(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Sinusoids of t, cosines first: (B,) → (B, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies[None]  # (B, half)
    embedding = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return F.pad(embedding, (0, 1)) if width % 2 else embedding


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, L, D = x.shape
        qkv = self.qkv(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, L, D / heads) each
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(x.reshape(B, L, D))


class Mlp(nn.Module):
    """Two linear layers with the exact GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block; with `skip` it first joins the long skip: Linear([x, skip])."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, qkv_bias: bool, skip: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads, qkv_bias)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, int(width * mlp_ratio))
        self.skip_linear = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            assert skip is not None
            x = self.skip_linear(torch.cat([x, skip], dim=-1))  # (B, L, D)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """(B, C, H, W) → (B, patches, D), by a strided convolution."""

    def __init__(self, patch_size: int, in_chans: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class UViT(ModelMixin, ConfigMixin):
    """`eps = model(x, t)`; `model(x, t, y=labels)` with classes, `model(x, t, context=tokens)` with text.

    depth       depth//2 blocks in, one in the middle, depth//2 out: N = depth//2 long skips
    num_classes rows of the label table, the null label included; None or 0 without classes
    clip_dim, num_clip_token   width and number of the text tokens; None or 0 without text
    conv        a 3×3 convolution at the end
    init_std    standard deviation of linear weights and of the position table
    scaling     a spec of `scalelong.scaling`, applied as `scalelong.apply` does
    """

    config_name = "config.json"
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
    ) -> None:
        super().__init__()
        spec = parse_scaling(scaling)
        num_classes, clip_dim, num_clip_token = num_classes or None, clip_dim or None, num_clip_token or None
        self.register_to_config(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            mlp_time_embed=mlp_time_embed,
            num_classes=num_classes,
            clip_dim=clip_dim,
            num_clip_token=num_clip_token,
            conv=conv,
            init_std=init_std,
            scaling=spec.to_dict(),
        )
        _check_sizes(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio, init_std)
        if num_classes and clip_dim:
            raise ScaleLongError("a U-ViT is conditioned on classes (num_classes) or on text (clip_dim), not on both")
        if bool(clip_dim) != bool(num_clip_token):
            raise ScaleLongError(f"text needs both clip_dim and num_clip_token, not {clip_dim} and {num_clip_token}")

        self.patch_size, self.in_chans = patch_size, in_chans
        self.num_classes, self.clip_dim, self.num_clip_token = num_classes, clip_dim, num_clip_token
        self.extras = 1 + (1 if num_classes else 0) + (num_clip_token or 0)  # time, label or text tokens
        self.patches = (img_size // patch_size) ** 2
        self.gradient_checkpointing = False

        D = embed_dim
        self.patch_embed = PatchEmbed(patch_size, in_chans, D)
        self.time_embed = (
            nn.Sequential(nn.Linear(D, 4 * D), nn.SiLU(), nn.Linear(4 * D, D)) if mlp_time_embed else nn.Identity()
        )
        if num_classes:
            self.label_emb = nn.Embedding(num_classes, D)
        if clip_dim:
            self.context_embed = nn.Linear(clip_dim, D)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.extras + self.patches, D))
        shape: dict[str, Any] = {"width": D, "num_heads": num_heads, "mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias}
        self.in_blocks = nn.ModuleList(Block(**shape) for _ in range(depth // 2))
        self.mid_block = Block(**shape)
        self.out_blocks = nn.ModuleList(Block(**shape, skip=True) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(D)
        self.decoder_pred = nn.Linear(D, patch_size**2 * in_chans)
        self.final_layer = nn.Conv2d(in_chans, in_chans, 3, padding=1) if conv else nn.Identity()
        self.long_skips = tuple(  # outermost first
            Site(f"out_blocks.{depth // 2 - 1 - k}", channels=D, dim=-1, tokens=self.extras + self.patches,
                 source=f"in_blocks.{k}")
            for k in range(depth // 2)
        )  # fmt: skip
        self._initialise(init_std)
        apply(self, spec)

    def _initialise(self, std: float) -> None:
        """Truncated normals for linear weights and positions, zero biases; the rest keeps PyTorch's own."""
        nn.init.trunc_normal_(self.pos_embed, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, t: Tensor | float, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        self._check_inputs(x, y, context)
        B, _, H, W = x.shape
        t = torch.as_tensor(t, device=x.device).expand(B)
        x = self.patch_embed(x)  # (B, patches, D)
        time = self.time_embed(timestep_embedding(t, x.shape[-1]).to(x.dtype))  # (B, D)
        tokens = [time[:, None], x]
        if y is not None:
            tokens = [self.label_emb(y)[:, None].to(x.dtype), time[:, None], x]
        if context is not None:
            tokens = [time[:, None], self.context_embed(context).to(x.dtype), x]
        x = torch.cat(tokens, dim=1) + self.pos_embed  # (B, extras + patches, D)

        skips = []
        for block in self.in_blocks:
            x = self._run(block, x)
            skips.append(x)  # long skip 1 first
        x = self._run(self.mid_block, x)
        for block in self.out_blocks:
            i = len(skips)  # N, …, 1
            skip = scale_skip(self, skips.pop(), i)  # κ_i · x_i
            x = self._run(block, x, skip)  # (B, L, D)

        x = self.decoder_pred(self.norm(x))[:, self.extras :]  # (B, patches, p·p·C)
        return self.final_layer(self._unpatchify(x, H, W))  # (B, C, H, W)

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *inputs)
        return block(*inputs)

    def _unpatchify(self, x: Tensor, H: int, W: int) -> Tensor:
        """(B, patches, p·p·C), inside a patch in the order row, column, channel → (B, C, H, W)."""
        p, C = self.patch_size, self.in_chans
        x = x.reshape(x.shape[0], H // p, W // p, p, p, C)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], C, H, W)

    def _check_inputs(self, x: Tensor, y: Tensor | None, context: Tensor | None) -> None:
        size = self.config.img_size
        if x.ndim != 4 or x.shape[1:] != (self.in_chans, size, size):
            raise ScaleLongError(
                f"the input is (batch, {self.in_chans}, {size}, {size}) for this U-ViT, not {tuple(x.shape)}"
            )
        if (y is None) == bool(self.num_classes):
            needed = (
                f"needs labels y (num_classes={self.num_classes})" if y is None else "has no classes, but y is given"
            )
            raise ScaleLongError(f"this U-ViT {needed}")
        if y is not None and y.shape != x.shape[:1]:
            raise ScaleLongError(f"y is one label a sample, shape ({x.shape[0]},), not {tuple(y.shape)}")
        if (context is None) == bool(self.clip_dim):
            needed = "needs text tokens (context)" if context is None else "takes no text, but context is given"
            raise ScaleLongError(f"this U-ViT {needed}")
        expected = (x.shape[0], self.num_clip_token, self.clip_dim)
        if context is not None and context.shape != expected:
            raise ScaleLongError(f"context is (batch, tokens, width) = {expected}, not {tuple(context.shape)}")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> UViT:
        """Load a folder that `save_pretrained` wrote, scaling included."""
        model = super().from_pretrained(*args, **kwargs)
        with torch.no_grad():  # memory-mapped weights may be unaligned, which is slower and rounds otherwise
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return model

    @classmethod
    def from_official(
        cls,
        path_or_state_dict: str | Path | dict[str, Tensor],
        *,
        img_size: int,
        num_heads: int,
        scaling: Scaling | str | dict[str, Any] | None = None,
    ) -> UViT:
        """Load weights published by U-ViT or ScaleLong (`.pth` or safetensors); the rest is read off their shapes.

        scaling=None takes LS where its weights (`se.*`) are there, and no scaling elsewhere.
        """
        from scalelong.models.official import load_official

        return load_official(cls, path_or_state_dict, img_size=img_size, num_heads=num_heads, scaling=scaling)


def _check_sizes(
    img_size: int,
    patch_size: int,
    in_chans: int,
    embed_dim: int,
    depth: int,
    num_heads: int,
    mlp_ratio: float,
    init_std: float,
) -> None:
    counts = {
        "img_size": img_size,
        "patch_size": patch_size,
        "in_chans": in_chans,
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
    }
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScaleLongError(f"{name} is a whole number from 1 up, not {value!r}")
    if img_size % patch_size:
        raise ScaleLongError(f"img_size {img_size} is not divisible by patch_size {patch_size}")
    if embed_dim % num_heads:
        raise ScaleLongError(f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}")
    if depth < 2:
        raise ScaleLongError(f"depth {depth} leaves no long skip; 2 is the least")
    for name, number in {"mlp_ratio": mlp_ratio, "init_std": init_std}.items():
        if not isinstance(number, (int, float)) or not number > 0:
            raise ScaleLongError(f"{name} is a number above 0, not {number!r}")
    if not 1 <= embed_dim * mlp_ratio < 2**31:
        raise ScaleLongError(f"mlp_ratio {mlp_ratio} gives an MLP {embed_dim * mlp_ratio:g} wide; 1 is the least")
