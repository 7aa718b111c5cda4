"""Text-to-image: on latents as the paper's MS-COCO runs, and samples that show what the prompt says."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from scalelong import ConstantScaling, load_run
from scalelong.runs.generate import Request, generate
from scalelong.training.loop import train
from tiny_runs import read_lines, tiny_config
from training_encoders import small_clip, small_vae


@pytest.mark.parametrize("kind", ["uvit", "unet"])
def test_a_latent_text_to_image_run_trains_and_samples(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for k in range(12):
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(images / f"{k}.png")
        (images / f"{k}.txt").write_text(f"picture {'abc'[k % 3]}")
    settings = {
        "data__name": str(images), "data__validation": "train", "data__vae": str(small_vae(tmp_path / "vae")),
        "data__text": str(small_clip(tmp_path / "clip")), "data__text_tokens": 7, "train__steps": 2,
        "train__batch_size": 4, "train__precision": "fp32", "validate__n": 4,
    }  # fmt: skip
    preset = "coco-uvit-s"
    if kind == "unet":
        preset = "coco-unet"
        settings |= {"model__channels": "32,32,32", "model__layers": 1}
    config = tiny_config(preset, **settings, scaling=ConstantScaling(0.8))
    train(config, tmp_path / "run", quiet=True)
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    trained = load_run(tmp_path / "run")
    assert (trained.facts.shapes.channels, trained.facts.shapes.size, trained.facts.shapes.text_tokens) == (4, 8, 7)
    request = Request(n=2, sampler="dpm-solver++", steps=3, guidance=2.0, prompts=["picture a", "picture b"])
    made = np.concatenate(list(generate(trained.net, trained.config, trained.facts, request)))
    assert made.shape == (2, 64, 64, 3)
    assert not np.array_equal(made[0], made[1])


COLOURS = {
    "red": (220, 30, 30), "green": (30, 170, 40), "blue": (40, 60, 220), "yellow": (240, 220, 40),
    "white": (245, 245, 245), "black": (10, 10, 10),
}  # fmt: skip
PROMPTS = [f"a {colour} {shape}" for colour in COLOURS for shape in ("square", "disc")]


def draw_shapes(folder, each):
    """Squares and discs of six colours on grey, here and there, each with its caption."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k, caption in enumerate(PROMPTS * each):
        _, colour, shape = caption.split()
        x, y = rng.integers(1, 5, 2)
        image = Image.new("RGB", (16, 16), (128, 128, 128))
        draw = ImageDraw.Draw(image)
        (draw.rectangle if shape == "square" else draw.ellipse)((x, y, x + 10, y + 10), fill=COLOURS[colour])
        image.save(folder / f"{k}.png")
        (folder / f"{k}.txt").write_text(caption)


@pytest.mark.slow
def test_samples_show_what_the_prompt_says(tmp_path, monkeypatch):
    """The preset's text path, MiniLM's real weights in it, learns colours in some hundred steps."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    draw_shapes(tmp_path / "shapes", each=16)
    config = tiny_config(
        "emoji-tiny", data__name=str(tmp_path / "shapes"), data__validation="train", data__text_tokens=8,
        model__embed_dim=64, train__batch_size=32, train__steps=800, train__lr=2e-3, train__warmup=50,
        checkpoint__every=800, ema__decay=0.99, scaling=ConstantScaling(0.8),
    )  # fmt: skip
    train(config, tmp_path / "run", quiet=True)
    trained = load_run(tmp_path / "run")
    asked = [caption for caption in PROMPTS for _ in range(4)]
    right = {}
    for guidance in (3.0, 0.0):
        request = Request(n=len(asked), sampler="dpm-solver++", steps=15, guidance=guidance, prompts=asked)
        made = np.concatenate(list(generate(trained.net, trained.config, trained.facts, request)))
        centre = made[:, 6:10, 6:10].reshape(len(made), -1, 3).mean(1)
        apart = np.linalg.norm(centre[:, None] - np.array(list(COLOURS.values()))[None], axis=2)
        named = [list(COLOURS)[k] for k in apart.argmin(1)]
        right[guidance] = np.mean([colour == caption.split()[1] for colour, caption in zip(named, asked, strict=True)])
    print(right)  # docs/training.md tells it: pytest -s
    assert right[3.0] > 0.7, right
    assert right[0.0] < 0.4, right
