"""Hugging Face's Trainer with scaled long skips and the stability monitor as a callback, on the embedded digits.

pip install transformers; python examples/trainer_callback.py --steps 200
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments

import scalelong
from scalelong import ConstantScaling
from scalelong.integrations.transformers import StabilityCallback


class Diffusion(torch.nn.Module):
    """Trainer wants a model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        )  # fmt: skip
        scalelong.apply(self.unet, ConstantScaling(0.7))  # the one line, before the Trainer
        self.scheduler = DDPMScheduler()

    def forward(self, pixel_values):
        noise, t = torch.randn_like(pixel_values), torch.randint(1000, (len(pixel_values),), device=pixel_values.device)
        return {"loss": F.mse_loss(self.unet(self.scheduler.add_noise(pixel_values, noise, t), t).sample, noise)}


def main(steps: int = 200, batch_size: int = 32, out: Path = Path("trainer-run"), every: int = 10):
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8) in [-1, 1]
    watch = StabilityCallback(every=every, out=out / "stability.jsonl")
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=batch_size, learning_rate=1e-3,
        logging_steps=every, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = [{"pixel_values": image} for image in images]
    Trainer(Diffusion(), arguments, train_dataset=data, callbacks=[watch]).train()
    print(watch.watch.summary())
    return watch.watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("trainer-run"))
    main(**vars(parser.parse_args()))
