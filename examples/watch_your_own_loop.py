"""Monitor the stability of your own loop: a diffusers U-Net on the 8×8 digits, in plain PyTorch.

python examples/watch_your_own_loop.py --steps 300 --kappa 0.8 --out stability.jsonl
"""

import argparse
from pathlib import Path

import torch
from diffusers import UNet2DModel
from sklearn.datasets import load_digits

import scalelong
from scalelong import ConstantScaling, StabilityMonitor


def main(steps: int = 300, kappa: float | None = None, out: Path = Path("stability.jsonl")) -> StabilityMonitor:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8) in [-1, 1]
    alpha_bar = torch.linspace(1 - 1e-4, 1 - 0.02, 1000).cumprod(0)
    net = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    if kappa is not None:
        scalelong.apply(net, ConstantScaling(kappa))

    def noisy(x_0: torch.Tensor, t: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:  # Eq. 1
        a = alpha_bar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x_0 + (1 - a).sqrt() * eps

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    t = torch.arange(62, 1000, 125)  # the probe: eight images with a timestep each, the same in every snapshot
    watch = StabilityMonitor(net, probe=(noisy(images[:8], t, torch.randn(8, 1, 8, 8)), t), out=out)
    for step in range(1, steps + 1):
        x_0, t, eps = images[torch.randint(1797, (32,))], torch.randint(1000, (32,)), torch.randn(32, 1, 8, 8)
        with watch.step(step):  # forward and backward; clipping and the optimizer come after
            losses = (net(noisy(x_0, t, eps), t).sample - eps).square().flatten(1).mean(1)
            losses.mean().backward()
            watch.note(loss=losses, t=t)
        watch.note(grad_norm=torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    print(watch.summary())
    watch.remove()
    return watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kappa", type=float, help="scale the long skips by CS with this kappa")
    parser.add_argument("--out", type=Path, default=Path("stability.jsonl"))
    main(**vars(parser.parse_args()))
