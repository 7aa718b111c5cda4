"""FreeU on a trained pipeline: the same seeds without it (first row) and with it (second row).

python examples/freeu.py stabilityai/stable-diffusion-xl-base-1.0 --setting sdxl --prompt "a fox in the snow"
python examples/freeu.py google/ddpm-cifar10-32 --version 2
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image

import scalelong
from scalelong import FreeU


def main(
    model: str, prompt: str | None = None, setting: str = "sd2.1", version: int = 1, steps: int = 25, n: int = 4,
    seed: int = 0, out: Path = Path("freeu.png"),
) -> Image.Image:  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.float16 if device == "cuda" else None).to(device)
    net = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    call = {"batch_size": n} if prompt is None else {"prompt": prompt, "num_images_per_prompt": n}

    def sample() -> list[Image.Image]:
        generator = torch.Generator(device).manual_seed(seed)
        return pipe(**call, num_inference_steps=steps, generator=generator).images

    without = sample()
    scalelong.apply(net.eval(), FreeU.named(setting, version))
    rows = [without, sample()]
    scalelong.remove(net)  # bit for bit the network it was
    width, height = without[0].size
    sheet = Image.new("RGB", (n * width, 2 * height))
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            sheet.paste(image, (x * width, y * height))
    sheet.save(out)
    print(f"first row: as trained; second row: {FreeU.named(setting, version)}; the picture is in {out}")
    return sheet


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("--prompt")
    parser.add_argument("--setting", default="sd2.1", help="sd1.4, sd1.5, sd2.1 or sdxl")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("freeu.png"))
    main(**vars(parser.parse_args()))
