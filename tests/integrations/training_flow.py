"""The flow of diffusers' train_unconditional and train_text_to_image at toy size. As a command it resumes.

python training_flow.py OUT
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.training_utils import EMAModel

import scalelong
from scalelong.integrations.diffusers import register_hooks

SMALL = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
STEPS, SAVED = 4, 2


def build(task: str) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    if task == "unconditional":
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        return UNet2DModel(**SMALL, **blocks), {}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
    net = UNet2DConditionModel(
        **SMALL, **blocks, in_channels=3, out_channels=3, cross_attention_dim=8, attention_head_dim=4
    )
    return net, {"encoder_hidden_states": torch.randn(4, 3, 8)}


def train(task: str, folder: Path, start: int, stop: int) -> dict[str, torch.Tensor]:
    accelerator = Accelerator()
    unet, condition = build(task)
    scalelong.apply(unet, scalelong.LearnableScaling())
    foreach = task == "text"
    ema = EMAModel(unet.parameters(), decay=0.9, model_cls=type(unet), model_config=unet.config, foreach=foreach)
    register_hooks(accelerator, ema=ema)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    unet, optimizer = accelerator.prepare(unet, optimizer)
    scheduler = DDPMScheduler()
    if start:
        accelerator.load_state(str(folder / "checkpoint"))
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        x, noise = (torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2))
        t = torch.randint(0, 1000, (4,), generator=generator)
        with accelerator.accumulate(unet):
            predicted = unet(scheduler.add_noise(x, noise, t), t, **condition).sample
            accelerator.backward((predicted - noise).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        ema.step(unet.parameters())
        if step + 1 == SAVED and not start:
            accelerator.save_state(str(folder / "checkpoint"))
    ema.store(unet.parameters())
    weights = {f"net.{k}": p.detach().clone() for k, p in unet.named_parameters()}
    return weights | {
        f"ema.{k}": p.clone() for (k, _), p in zip(unet.named_parameters(), ema.shadow_params, strict=True)
    }


def run(out: Path, part: str) -> None:
    for task in ("unconditional", "text"):
        weights = train(task, out / task, SAVED if part == "resumed" else 0, STEPS)
        torch.save(weights, out / f"{task}-{part}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), "resumed")
