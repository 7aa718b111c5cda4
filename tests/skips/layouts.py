"""Layouts of networks that are not packages: their names and joins, with the smallest possible blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A ResNet block that knows its widths, as EDM's and ddim's do."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.norm0 = nn.GroupNorm(2, in_channels)
        self.conv0 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor | None = None) -> Tensor:
        return self.conv0(self.norm0(x).relu()) + self.skip(x)


class DictUNet(nn.Module):
    """EDM's and CorrDiff's: dictionaries `enc` and `dec`; blocks of `dec` with room take [x, skip]."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleDict({"8x8_conv": nn.Conv2d(3, 4, 1), "8x8_block0": Block(4, 4), "4x4_down": Block(4, 6)})
        self.dec = nn.ModuleDict(
            {"4x4_in0": Block(6, 6), "4x4_block0": Block(12, 6), "8x8_up": Block(6, 6), "8x8_block0": Block(10, 4),
             "8x8_block1": Block(8, 4), "8x8_aux_norm": nn.GroupNorm(2, 4), "8x8_aux_conv": nn.Conv2d(4, 3, 1)}
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skips = []
        for block in self.enc.values():
            x = block(x)
            skips.append(x)
        for name, block in self.dec.items():
            if "aux" not in name and x.shape[1] != block.in_channels:
                x = torch.cat([x, skips.pop()], dim=1)
            x = block(x)
        return x


class LevelUNet(nn.Module):
    """ddim's and latent-diffusion's `Model`: `up[level].block[k]` takes [h, skip], from the last level to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.down, self.up, self.mid = nn.ModuleList(), nn.ModuleList(), nn.Module()
        for width_in, width in ((4, 4), (4, 8)):
            level = nn.Module()
            level.block, level.attn = nn.ModuleList([Block(width_in, width)]), nn.ModuleList()
            self.down.append(level)
        self.down[0].downsample = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.mid.block_1, self.mid.block_2 = Block(8, 8), Block(8, 8)
        for level, blocks in enumerate(([Block(12, 4), Block(8, 4)], [Block(16, 8), Block(12, 8)])):
            up = nn.Module()
            up.block, up.attn = nn.ModuleList(blocks), nn.ModuleList()
            if level:
                up.upsample = nn.Upsample(scale_factor=2)
            self.up.append(up)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hs = [self.conv_in(x)]
        for level in self.down:
            hs.append(level.block[0](hs[-1]))
            if hasattr(level, "downsample"):
                hs.append(level.downsample(hs[-1]))
        h = self.mid.block_2(self.mid.block_1(hs[-1]))
        for level in reversed(self.up):
            for block in level.block:
                h = block(torch.cat([h, hs.pop()], dim=1))
            h = level.upsample(h) if hasattr(level, "upsample") else h
        return self.conv_out(h)


class ReducedUNet(nn.Module):
    """U-DiT's, DiCo's and FCDM's: a 1×1 convolution `reduce_chan_level…` takes [x, skip]."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.final_layer = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 3, 1)
        self.encoder_level_1, self.encoder_level_2 = nn.ModuleList([Block(4, 4)]), nn.ModuleList([Block(8, 8)])
        self.down1_2 = nn.Sequential(nn.Conv2d(4, 2, 1), nn.PixelUnshuffle(2))
        self.down2_3 = nn.Sequential(nn.Conv2d(8, 4, 1), nn.PixelUnshuffle(2))
        self.latent = nn.ModuleList([Block(16, 16)])
        self.up3_2 = nn.Sequential(nn.Conv2d(16, 32, 1), nn.PixelShuffle(2))
        self.up2_1 = nn.Sequential(nn.Conv2d(8, 16, 1), nn.PixelShuffle(2))
        self.reduce_chan_level2, self.reduce_chan_level1 = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        level1 = self.encoder_level_1[0](self.x_embedder(x))
        level2 = self.encoder_level_2[0](self.down1_2(level1))
        x = self.latent[0](self.down2_3(level2))
        x = self.reduce_chan_level2(torch.cat([self.up3_2(x), level2], dim=1))
        x = self.reduce_chan_level1(torch.cat([self.up2_1(x), level1], dim=1))
        return self.final_layer(x)


class SparseUNet(nn.Module):
    """DiC's: every second block of a stage of `dec_blocks` takes [x, skip]."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.output = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.enc_blocks = nn.ModuleList([nn.ModuleList([Block(4, 4), Block(4, 4)]), nn.ModuleList([Block(8, 8)])])
        self.downs = nn.ModuleList([nn.Conv2d(4, 8, 2, stride=2), nn.Conv2d(8, 8, 2, stride=2)])
        self.lat_blocks = nn.ModuleList([nn.ModuleList([Block(8, 8)])])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)])
        self.dec_blocks = nn.ModuleList([nn.ModuleList([Block(16, 8)]), nn.ModuleList([Block(8, 4), Block(4, 4)])])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, skips = self.x_embedder(x), []
        for stage, down in zip(self.enc_blocks, self.downs, strict=True):
            for block in stage:
                x = block(x)
            skips.append(x)
            x = down(x)
        x = self.lat_blocks[0][0](x)
        for stage, up in zip(self.dec_blocks, self.ups, strict=True):
            x = up(x)
            for k, block in enumerate(stage):
                x = block(torch.cat([x, skips.pop()], dim=1) if k % 2 == 0 else x)
        return self.output(x)


class UBlock(nn.Sequential):
    def forward(self, x: Tensor, cond: Tensor, skip: Tensor | None = None) -> Tensor:
        return super().forward(x if skip is None else torch.cat([x, skip], dim=1))


class MirroredUNet(nn.Module):
    """k-diffusion's first: `u_net.u_blocks` but the first take `skip`; the first `skip_stages` do not run."""

    def __init__(self, skip_stages: int = 0) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.u_net = nn.Module()
        self.u_net.d_blocks = nn.ModuleList([nn.Sequential(Block(4, w)) for w in (4, 4, 4)])
        self.u_net.u_blocks = nn.ModuleList([UBlock(Block(w, 4)) for w in (4, 8, 8)])
        self.u_net.skip_stages = skip_stages

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, skips = self.proj_in(x), []
        for block in self.u_net.d_blocks[self.u_net.skip_stages :]:
            x = block(x)
            skips.append(x)
        for k, (block, skip) in enumerate(zip(self.u_net.u_blocks, reversed(skips), strict=False)):
            x = block(x, t, skip if k > 0 else None)
        return self.proj_out(x)
