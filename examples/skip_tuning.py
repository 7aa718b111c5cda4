"""Skip-Tuning of a trained pipeline: the same seeds with several ρ, one row each, without training.

python examples/skip_tuning.py stabilityai/stable-diffusion-2-1 --prompt "a fox in the snow" --steps 10
python examples/skip_tuning.py google/ddpm-cifar10-32 --rho 1.0 0.9 0.8 --after-norm
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image

import scalelong
from scalelong import SkipTuning


def main(
    model: str, prompt: str | None = None, rho: tuple[float, ...] = (1.0, 0.9, 0.8), steps: int = 10, n: int = 4,
    seed: int = 0, after_norm: bool = False, out: Path = Path("skip-tuning.png"),
) -> Image.Image:  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.float16 if device == "cuda" else None).to(device)
    net = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    # Networks that normalize the concatenation hardly feel ρ at the join; scalelong.describe(net, *example) measures it
    scalelong.apply(net.eval(), SkipTuning(1.0), placement="after_norm" if after_norm else "join")
    call = {"batch_size": n} if prompt is None else {"prompt": prompt, "num_images_per_prompt": n}
    rows = []
    for value in rho:
        scalelong.set_coefficients(net, SkipTuning(value))  # no new hooks; a compiled network does not recompile
        generator = torch.Generator(device).manual_seed(seed)
        rows.append(pipe(**call, num_inference_steps=steps, generator=generator).images)
        print(f"row {len(rows)}: ρ from 1 (outermost) to {value:g} (innermost)")
    width, height = rows[0][0].size
    sheet = Image.new("RGB", (n * width, len(rows) * height))
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            sheet.paste(image, (x * width, y * height))
    sheet.save(out)
    print(scalelong.describe(net), f"the picture is in {out}", sep="\n")
    return sheet


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("--prompt")
    parser.add_argument("--rho", type=float, nargs="+", default=(1.0, 0.9, 0.8))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after-norm", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("skip-tuning.png"))
    main(**vars(parser.parse_args()))
