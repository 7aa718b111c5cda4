"""lucidrains' denoising-diffusion-pytorch with scaled long skips, on scikit-learn's embedded digits.

pip install denoising-diffusion-pytorch; python examples/lucidrains_unet.py --steps 200
"""

import argparse

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from sklearn.datasets import load_digits

import scalelong
from scalelong import LearnableScaling


def main(steps: int = 200, batch_size: int = 32, dim: int = 16) -> list[float]:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8) in [0, 1]
    unet = Unet(dim=dim, dim_mults=(1, 2), channels=1)
    scalelong.apply(unet, LearnableScaling())  # the U-Net itself; GaussianDiffusion is the loss and sampler around it
    print(scalelong.describe(unet, images[:4] * 2 - 1, torch.tensor([10, 200, 500, 900])))

    diffusion = GaussianDiffusion(unet, image_size=8, timesteps=1000, objective="pred_noise")
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3)
    losses = []
    for step in range(1, steps + 1):
        loss = diffusion(images[torch.randint(len(images), (batch_size,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}")
    print(scalelong.describe(unet, images[:4] * 2 - 1, torch.tensor([10, 200, 500, 900])))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
