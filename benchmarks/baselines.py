"""Baselines: U-ViT and its training loop as such code is usually written, diffusers' example loop, lucidrains' U-Net.

The plain U-ViT concatenates skips, multiplies κ in the block, uses AdamW with default options, averages weights one
tensor at a time, loads PIL images through a `DataLoader` and draws noise from the global generator. Its parameters
have U-ViT's names, so both networks load one state dict and their losses can be compared (tests/benchmarks).
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from scalelong.models.uvit import timestep_embedding


class PlainBlock(nn.Module):
    """A pre-norm block in one class, as in a tutorial."""

    def __init__(self, width: int, heads: int, skip: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width, bias=False), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})
        if skip:
            self.skip_linear = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor | None = None, kappa: float = 1.0) -> Tensor:
        if skip is not None:
            x = self.skip_linear(torch.cat([x, kappa * skip if kappa != 1.0 else skip], dim=-1))
        B, L, D = x.shape
        qkv = self.attn["qkv"](self.norm1(x)).reshape(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, L, D)
        x = x + self.attn["proj"](attended)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class PlainUViT(nn.Module):
    """The unconditional U-ViT of the paper, depth//2 long skips, κ_i = kappa**(i − 1)."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        in_chans: int = 3,
        mlp_time_embed: bool = False,
        kappa: float = 1.0,
    ) -> None:
        super().__init__()
        D, self.kappa = embed_dim, kappa
        self.patch_size, self.in_chans, self.img_size = patch_size, in_chans, img_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(in_chans, D, patch_size, stride=patch_size)})
        self.time_embed = (
            nn.Sequential(nn.Linear(D, 4 * D), nn.SiLU(), nn.Linear(4 * D, D)) if mlp_time_embed else nn.Identity()
        )
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (img_size // patch_size) ** 2, D))
        self.in_blocks = nn.ModuleList(PlainBlock(D, num_heads, False) for _ in range(depth // 2))
        self.mid_block = PlainBlock(D, num_heads, False)
        self.out_blocks = nn.ModuleList(PlainBlock(D, num_heads, True) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(D)
        self.decoder_pred = nn.Linear(D, patch_size**2 * in_chans)
        self.final_layer = nn.Conv2d(in_chans, in_chans, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)  # (B, patches, D)
        time = self.time_embed(timestep_embedding(t, x.shape[-1]))
        x = torch.cat([time.unsqueeze(1), x], dim=1) + self.pos_embed
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            index = len(skips)
            x = block(x, skips.pop(), self.kappa ** (index - 1))
        x = self.decoder_pred(self.norm(x))[:, 1:]
        B, p, C, side = x.shape[0], self.patch_size, self.in_chans, self.img_size // self.patch_size
        x = x.reshape(B, side, side, p, p, C).permute(0, 5, 1, 3, 2, 4).reshape(B, C, self.img_size, self.img_size)
        return self.final_layer(x)


class PilImages(Dataset[Tensor]):
    """Images one by one through PIL: opened from memory, flipped at random, converted to [−1, 1]."""

    def __init__(self, images: np.ndarray[Any, Any], flip: bool) -> None:
        from PIL import Image

        self.image_of: Callable[[np.ndarray[Any, Any]], Any] = Image.fromarray
        self.mirror = Image.Transpose.FLIP_LEFT_RIGHT
        self.images, self.flip = images, flip  # uint8 (n, h, w, c)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        pixels = self.images[index]
        image = self.image_of(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels))
        if self.flip and torch.rand(1).item() < 0.5:
            image = image.transpose(self.mirror)
        array = np.array(image, dtype=np.uint8).reshape(pixels.shape)
        return torch.from_numpy(array).permute(2, 0, 1).float().div(255).mul(2).sub(1)


class PlainLoop:
    """Data, forward, backward, clipping, AdamW and EMA for any network called as `net(x_t, t)`."""

    def __init__(
        self,
        net: nn.Module,
        images: np.ndarray[Any, Any],
        *,
        batch_size: int,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        flip: bool,
        clip: float | None = 1.0,
        decay: float = 0.9999,
    ) -> None:
        self.net, self.clip, self.decay = net, clip, decay
        self.averaged = copy.deepcopy(net).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
        self.loader = DataLoader(PilImages(images, flip), batch_size=batch_size, shuffle=True, drop_last=True)
        self.batches: Iterator[Tensor] = iter(self.loader)

    def batch(self) -> Tensor:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def step(self) -> float:
        """One step on the next batch with random times and noise."""
        x_0 = self.batch()
        return self.update(x_0, torch.rand(len(x_0)), torch.randn_like(x_0))

    def update(self, x_0: Tensor, t: Tensor, eps: Tensor) -> float:
        """One step on this batch: VP process with β from 0.1 to 20, t in [0, 1]."""
        log_alpha = -0.25 * t**2 * (20.0 - 0.1) - 0.5 * t * 0.1
        alpha = log_alpha.exp()[:, None, None, None]
        sigma = (1 - torch.exp(2 * log_alpha)).sqrt()[:, None, None, None]
        loss = F.mse_loss(self.net(alpha * x_0 + sigma * eps, 999 * t), eps)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        self.average()
        return loss.item()

    @torch.no_grad()
    def average(self) -> None:
        for mine, theirs in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


class DiffusersLoop(PlainLoop):
    """The step of diffusers' unconditional training example: DDPMScheduler, AdamW, clipping, EMAModel."""

    def __init__(self, net: nn.Module, images: Any, **options: Any) -> None:
        super().__init__(net, images, **options)
        from diffusers import DDPMScheduler
        from diffusers.training_utils import EMAModel

        self.scheduler = DDPMScheduler(num_train_timesteps=1000)
        self.ema = EMAModel(net.parameters(), decay=self.decay, use_ema_warmup=True, inv_gamma=1.0, power=0.75)

    def update(self, x_0: Tensor, t: Tensor, eps: Tensor) -> float:
        steps = (t * 1000).long().clamp(max=999)
        noisy = self.scheduler.add_noise(x_0, eps, steps)
        loss = F.mse_loss(self.net(noisy, steps).sample, eps)
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average()
        return loss.item()

    def average(self) -> None:
        self.ema.step(self.net.parameters())


def lucidrains_unet(dim: int, mults: tuple[int, ...]) -> nn.Module | None:
    """Return lucidrains' U-Net, or None if the package is not installed (see requirements-peers.txt)."""
    folder = Path(sys.prefix) / "peers"
    if not (folder / "denoising_diffusion_pytorch").is_dir():
        return None
    import diffusers.pipelines.ddpm  # noqa: F401  (before torchvision is on the path: it changes what diffusers imports)

    _declare_torchvision_operators()
    sys.path.append(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module("denoising_diffusion_pytorch")
    finally:
        sys.path.remove(str(folder))
    net: nn.Module = package.Unet(dim=dim, dim_mults=mults)
    return net


_LIBRARIES: list[torch.library.Library] = []  # kept alive: an operator dies with its library


def _declare_torchvision_operators() -> None:
    """Declare the two operators that torchvision's Python code needs; its binary has no CPU build for this torch."""
    if _LIBRARIES or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
