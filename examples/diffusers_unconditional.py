"""diffusers' unconditional training loop with scaled long skips, on scikit-learn's embedded digits.

python examples/diffusers_unconditional.py --steps 300 --out digits-ddpm
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import scalelong
from scalelong import ConstantScaling


def main(steps: int = 300, batch_size: int = 64, out: Path = Path("digits-ddpm")) -> list[float]:
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8) in [-1, 1]
    loader = DataLoader(TensorDataset(images), batch_size, shuffle=True, drop_last=True)
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scalelong.apply(unet, ConstantScaling(0.7))  # the one line: before the optimizer and before accelerate wraps it

    scheduler, ema = DDPMScheduler(), EMAModel(unet.parameters(), decay=0.99)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    accelerator = Accelerator()
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    losses: list[float] = []
    for (x,) in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps):
        noise, t = torch.randn_like(x), torch.randint(1000, (len(x),), device=x.device)
        loss = F.mse_loss(unet(scheduler.add_noise(x, noise, t), t).sample, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(unet.parameters())
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"step {len(losses)}: loss {sum(losses[-50:]) / 50:.4f}")

    unet = accelerator.unwrap_model(unet)
    ema.copy_to(unet.parameters())
    with scalelong.unscaled(unet):  # the scaling has files of its own
        DDPMPipeline(unet, scheduler).save_pretrained(out)
    scalelong.save_scaling(unet, out / "scaling")  # back with scalelong.load_scaling(pipe.unet, out / "scaling")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("digits-ddpm"))
    main(**vars(parser.parse_args()))
