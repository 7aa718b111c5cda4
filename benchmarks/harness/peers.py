"""What users would pick instead: diffusers' U-Net in its own example's loop, and lucidrains' package."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scalelong.bench.reference import ReferenceLoop
from torch import Tensor, nn


class DiffusersLoop(ReferenceLoop):
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
    """lucidrains' U-Net, or None where the package is not installed (requirements-peers.txt)."""
    folder = Path(sys.prefix) / "peers"
    if not (folder / "denoising_diffusion_pytorch").is_dir():
        return None
    import diffusers.pipelines.ddpm  # noqa: F401  (before torchvision can be seen: it changes what is imported)

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


_LIBRARIES: list[torch.library.Library] = []  # kept alive: an operator goes with its library


def _declare_torchvision_operators() -> None:
    """torchvision's Python part asks for these two, whose binary has no CPU build to go with torch's."""
    if _LIBRARIES or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
