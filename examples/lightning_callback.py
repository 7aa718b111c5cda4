"""A Lightning module with scaled long skips and the stability monitor as a callback, on the embedded digits.

pip install lightning; python examples/lightning_callback.py --steps 200
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import scalelong
from scalelong import ConstantScaling
from scalelong.integrations.lightning import StabilityCallback


class Diffusion(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
        scalelong.apply(self.unet, ConstantScaling(0.7))  # the one line, before configure_optimizers
        self.scheduler = DDPMScheduler()

    def training_step(self, batch, index):
        (x,) = batch
        noise, t = torch.randn_like(x), torch.randint(1000, (len(x),), device=x.device)
        return F.mse_loss(self.unet(self.scheduler.add_noise(x, noise, t), t).sample, noise)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 200, batch_size: int = 32, out: Path = Path("lightning-run"), every: int = 10):
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8) in [-1, 1]
    loader = DataLoader(TensorDataset(images), batch_size, shuffle=True, drop_last=True)
    watch = StabilityCallback(every=every, out=out / "stability.jsonl")
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[watch], gradient_clip_val=1.0, default_root_dir=out, logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, accelerator="auto",
    )  # fmt: skip
    trainer.fit(Diffusion(), loader)
    print(watch.watch.summary())
    return watch.watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("lightning-run"))
    main(**vars(parser.parse_args()))
