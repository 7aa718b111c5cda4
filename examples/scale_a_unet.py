"""One line scales the long skips of a diffusers U-Net: see it, feel it, learn κ, and take it off again."""

import sys

import torch
from diffusers import UNet2DModel

import scalelong
from scalelong import ConstantScaling, LearnableScaling

BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")


def say(title: str, *lines: object) -> None:
    print(f"{BOLD}{title}{PLAIN}", *lines, "", sep="\n")


def main() -> None:
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16, block_out_channels=(32, 64, 64), layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([50, 800])
    original = unet(x, t).sample.detach()

    def moved() -> str:
        change = (unet(x, t).sample.detach() - original).norm() / original.norm()
        return f"the output moved by {change:.1%}" if change else "the output is bit for bit the original"

    say("A diffusers U-Net as it is", scalelong.describe(unet))

    scalelong.apply(unet, ConstantScaling(0.7))
    say(">>> scalelong.apply(unet, ConstantScaling(0.7))", scalelong.describe(unet, x, t), moved())

    scalelong.apply(unet, ConstantScaling(0.7), placement="after_norm", replace=True)
    past = [row.norm_passes for row in scalelong.describe(unet, x, t).rows]
    told = f"past norm: {min(past):.3f} … {max(past):.3f}"
    say('>>> scalelong.apply(unet, ConstantScaling(0.7), placement="after_norm", replace=True)', told, moved())

    scalelong.apply(unet, LearnableScaling(init="identity"), replace=True)
    added, total = (sum(p.numel() for p in ps) for ps in (scalelong.parameters(unet), unet.parameters()))
    counted = f"{added:,} parameters more ({added / (total - added):.1%} of {total - added:,})"
    say('>>> scalelong.apply(unet, LearnableScaling(init="identity"), replace=True)', counted, moved())

    optimizer = torch.optim.AdamW(scalelong.parameters(unet), lr=0.03)
    for _ in range(5):
        optimizer.zero_grad()
        (unet(x, t).sample - x).square().mean().backward()
        optimizer.step()
    kappas = " ".join(f"{row.coefficient:.3f}" for row in scalelong.describe(unet, x, t).rows)
    say("… five steps of training LS alone", f"mean κ_i, outermost first: {kappas}", moved())

    scalelong.remove(unet)
    say(">>> scalelong.remove(unet)", moved())


if __name__ == "__main__":
    main()
