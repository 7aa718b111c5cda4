"""Small networks written here in the style of two repositories that are not packages: U-ViT and guided-diffusion."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(t: Tensor, width: int) -> Tensor:
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(width // 2) / (width // 2))
    angles = t.float()[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)  # (B, width)


# ------------------------------------------------------------------------------------------------ U-ViT


class UViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, skip: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class OriginalUViT(nn.Module):
    """The original's shape: time token, patches, blocks called `blk(x)` and `blk(x, skips.pop())`."""

    def __init__(self, img_size: int = 8, patch: int = 2, dim: int = 16, depth: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.patch, self.dim, self.extras = patch, dim, 1
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (img_size // patch) ** 2, dim))
        self.in_blocks = nn.ModuleList([UViTBlock(dim, heads) for _ in range(depth // 2)])
        self.mid_block = UViTBlock(dim, heads)
        self.out_blocks = nn.ModuleList([UViTBlock(dim, heads, skip=True) for _ in range(depth // 2)])
        self.norm = nn.LayerNorm(dim)
        self.decoder_pred = nn.Linear(dim, patch * patch * 3)
        self.use_checkpoint = False

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        size = x.shape[-1] // self.patch
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((sinusoids(t, self.dim)[:, None], x), dim=1) + self.pos_embed
        skips = []
        for blk in self.in_blocks:
            x = self._call(blk, x)
            skips.append(x)
        x = self._call(self.mid_block, x)
        for blk in self.out_blocks:
            x = self._call(blk, x, skips.pop())
        x = self.decoder_pred(self.norm(x))[:, 1:]
        x = x.view(-1, size, size, self.patch, self.patch, 3).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(-1, 3, size * self.patch, size * self.patch)

    def _call(self, blk: nn.Module, *inputs: Tensor) -> Tensor:
        if self.use_checkpoint:
            return torch.utils.checkpoint.checkpoint(blk, *inputs, use_reentrant=False)
        return blk(*inputs)


# ------------------------------------------------------------------------------------- guided-diffusion


class TimestepBlock(nn.Module):
    """A block whose forward takes the time embedding."""


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb) if isinstance(layer, TimestepBlock) else layer(x)
        return x


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.out_channels = channels
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = self.out_channels = channels
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class ResBlock(TimestepBlock):
    def __init__(self, channels: int, emb_channels: int, out_channels: int, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.channels, self.out_channels, self.use_checkpoint = channels, out_channels, use_checkpoint
        self.in_layers = nn.Sequential(
            nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, out_channels))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(4, out_channels),
            nn.SiLU(),
            nn.Dropout(0.0),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        self.skip_connection = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        if self.use_checkpoint:
            return torch.utils.checkpoint.checkpoint(self._forward, x, emb, use_reentrant=False)
        return self._forward(x, emb)

    def _forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(emb)[..., None, None]
        return self.skip_connection(x) + self.out_layers(h)


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x).flatten(2)).transpose(1, 2).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.proj_out(h).view_as(x)


class GuidedUNet(nn.Module):
    """guided-diffusion's UNetModel: the root's forward concatenates, `output_blocks` take [backbone, skip]."""

    def __init__(
        self, model_channels: int = 8, num_res_blocks: int = 1, channel_mult: tuple[int, ...] = (1, 2)
    ) -> None:
        super().__init__()
        self.model_channels = model_channels
        emb = 4 * model_channels
        self.time_embed = nn.Sequential(nn.Linear(model_channels, emb), nn.SiLU(), nn.Linear(emb, emb))
        ch = channel_mult[0] * model_channels
        self.input_blocks = nn.ModuleList([TimestepEmbedSequential(nn.Conv2d(3, ch, 3, padding=1))])
        widths = [ch]
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [ResBlock(ch, emb, mult * model_channels)]
                ch = mult * model_channels
                if level:
                    layers.append(AttentionBlock(ch))
                self.input_blocks.append(TimestepEmbedSequential(*layers))
                widths.append(ch)
            if level != len(channel_mult) - 1:
                self.input_blocks.append(TimestepEmbedSequential(Downsample(ch)))
                widths.append(ch)
        self.middle_block = TimestepEmbedSequential(ResBlock(ch, emb, ch), AttentionBlock(ch), ResBlock(ch, emb, ch))
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for k in range(num_res_blocks + 1):
                layers = [ResBlock(ch + widths.pop(), emb, mult * model_channels)]
                ch = mult * model_channels
                if level:
                    layers.append(AttentionBlock(ch))
                if level and k == num_res_blocks:
                    layers.append(Upsample(ch))
                self.output_blocks.append(TimestepEmbedSequential(*layers))
        self.out = nn.Sequential(nn.GroupNorm(4, ch), nn.SiLU(), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        hs = []
        emb = self.time_embed(sinusoids(timesteps, self.model_channels))
        h = x
        for module in self.input_blocks:
            h = module(h, emb)
            hs.append(h)
        h = self.middle_block(h, emb)
        for module in self.output_blocks:
            h = module(torch.cat([h, hs.pop()], dim=1), emb)
        return self.out(h)
