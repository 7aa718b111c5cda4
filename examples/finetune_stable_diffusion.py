"""Fine-tune a Stable-Diffusion-shaped UNet2DConditionModel, its long skips learned from the identity.

python examples/finetune_stable_diffusion.py --unet path/to/stable-diffusion/unet --out my-finetune
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel

import scalelong
from scalelong import LearnableScaling

SMALL = {"block_out_channels": (32, 64), "layers_per_block": 2, "cross_attention_dim": 64, "attention_head_dim": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "sample_size": 16,
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip


def main(unet: str | None = None, steps: int = 20, batch_size: int = 4, out: Path = Path("my-finetune")) -> list[float]:
    torch.manual_seed(0)
    net = UNet2DConditionModel.from_pretrained(unet) if unet else UNet2DConditionModel(**SMALL)
    size, width = net.config.sample_size, net.config.cross_attention_dim
    # Stand-ins for what a VAE and a text encoder give: take your own latents and embeddings here.
    latents, text = torch.randn(64, 4, size, size), torch.randn(64, 77, width)

    before = net(latents[:1], 500, text[:1]).sample
    scalelong.apply(net.train(), LearnableScaling(init="identity"))  # κ = 1 exactly: the trained network as it was
    assert torch.equal(net(latents[:1], 500, text[:1]).sample, before)
    net.enable_gradient_checkpointing()

    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    kappas = list(scalelong.parameters(net))
    rest = [p for p in net.parameters() if all(p is not k for k in kappas)]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 1e-5}, {"params": kappas, "lr": 1e-3}])
    losses = []
    for step in range(steps):
        pick = torch.randint(len(latents), (batch_size,))
        noise, t = torch.randn_like(latents[pick]), torch.randint(1000, (batch_size,))
        loss = F.mse_loss(net(scheduler.add_noise(latents[pick], noise, t), t, text[pick]).sample, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")

    print(scalelong.describe(net, latents[:1], 500, text[:1]))
    with scalelong.unscaled(net):  # LS's weights stay out of diffusers' own file
        net.save_pretrained(out)
    scalelong.save_scaling(net, out)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--unet")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("my-finetune"))
    main(**vars(parser.parse_args()))
