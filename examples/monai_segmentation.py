"""MONAI's BasicUNet with scaled long skips learns to segment discs in noisy pictures: not only for diffusion.

pip install monai; python examples/monai_segmentation.py --steps 100
"""

import argparse

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import BasicUNet

import scalelong
from scalelong import ConstantScaling, NoScaling
from scalelong.scaling import Scaling


def discs(n: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures (n, 1, size, size) and their masks, a disc in each."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(size)] * 2, indexing="ij"))  # (2, size, size)
    centre = torch.randint(8, size - 8, (n, 2, 1, 1))
    mask = ((grid - centre).square().sum(1, keepdim=True) < torch.randint(9, 50, (n, 1, 1, 1))).long()
    return mask + 0.8 * torch.randn(n, 1, size, size), mask


def train(scaling: Scaling, steps: int, batch_size: int) -> float:
    """Train one network; its Dice score on pictures that it has not seen."""
    torch.manual_seed(0)
    net = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 32, 8))
    scalelong.apply(net, scaling)
    optimizer, dice = torch.optim.AdamW(net.parameters(), lr=3e-3), DiceCELoss(to_onehot_y=True, softmax=True)
    for _ in range(steps):
        picture, mask = discs(batch_size)
        optimizer.zero_grad()
        dice(net(picture), mask).backward()
        optimizer.step()
    picture, mask = discs(64)
    with torch.no_grad():
        found = net.eval()(picture).argmax(1, keepdim=True)
    print(scalelong.describe(net, picture[:4]))
    return (2 * (found * mask).sum() / (found.sum() + mask.sum())).item()


def main(steps: int = 100, batch_size: int = 16) -> dict[str, float]:
    scores = {}
    for scaling in (NoScaling(), ConstantScaling(0.7)):
        scores[str(scaling)] = train(scaling, steps, batch_size)
        print(f"Dice {scores[str(scaling)]:.3f} after {steps} steps\n")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
