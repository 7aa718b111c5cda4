"""Presets, and the config of a command: `choose("digits", scaling="cs", steps=500)`.

There is one preset per row of the paper's table at full size, and small ones that train on a CPU.
"""

from __future__ import annotations

import json
import math
import re
import typing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from scalelong.errors import unknown
from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import CheckpointConfig as Checkpoint
from scalelong.runs.config import Config, convert, override, parse_settings
from scalelong.runs.config import DataConfig as Data
from scalelong.runs.config import DiffusionConfig as Diffusion
from scalelong.runs.config import EmaConfig as Ema
from scalelong.runs.config import ModelConfig as Model
from scalelong.runs.config import SampleConfig as Sample
from scalelong.runs.config import TrainConfig as Train
from scalelong.runs.config import ValidateConfig as Validate
from scalelong.scaling import parse_scaling


def preset(name: str) -> Config:
    """Return the config of a preset."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name].config


def choose(
    name: str,
    *,
    scaling: str | None = None,
    kappa: float | None = None,
    data: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    settings: list[str] | None = None,
) -> Config:
    """Return a preset with a command's options. `settings` (`--set`) take precedence over the other options."""
    options = {"data.name": data, "train.steps": steps, "train.batch_size": batch_size, "seed": seed, "kappa": kappa}
    pairs = parse_settings(settings or [])
    own = {key: value for key, value in pairs.items() if key.startswith("scaling.")}  # fields of the scaling
    config = override(preset(name), {key: value for key, value in options.items() if value is not None})
    config = override(config, {key: value for key, value in pairs.items() if key not in own})
    word = "cs" if scaling is None and kappa is not None else scaling
    if word in ("cs", "cs-reverse"):
        kappa = config.kappa if kappa is None else kappa
    elif word != "uniform":
        kappa = None
    spec = config.scaling if word is None else parse_scaling(word, kappa=kappa)
    hints, names = typing.get_type_hints(type(spec)), [f.name for f in fields(spec)]
    for key, text in own.items():
        field = key.removeprefix("scaling.")
        if field not in names:
            raise unknown(f"setting of scaling {spec.kind!r}:", key, [f"scaling.{n}" for n in names] or ["none"])
        spec = replace(spec, **{field: convert(text, hints[field], key)})
    return replace(config, scaling=spec)


def default_out(config: Config) -> Path:
    """Return runs/PRESET-SCALING-seedN."""
    name = f"{config.preset}-{config.scaling.label}-seed{config.seed}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name)


# ------------------------------------------------------------------------------------------------ sizes

SIZES = Path(__file__).with_name("preset_sizes.json")
CLIP = "openai/clip-vit-large-patch14"
TEXT_WIDTHS = {"minilm": 384, CLIP: 768}


def sizes() -> dict[str, dict[str, Any]]:
    """Return `size_of` every preset from a stored file, which takes no time. A test keeps the file correct."""
    return dict(json.loads(SIZES.read_text(encoding="utf-8")))


def size_of(config: Config) -> dict[str, Any]:
    """Count parameters, long skips and FLOP per training step (one forward pass, a backward pass costs two)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from scalelong.runs.run import build_network
    from scalelong.skips import find_sites

    shapes = expected_shapes(config)
    with torch.device("meta"):
        net = build_network(config, shapes)
        x = torch.zeros(1, shapes.channels, shapes.size, shapes.size)
        y = torch.zeros(1, dtype=torch.long) if shapes.label_rows else None
        context = torch.zeros(1, shapes.text_tokens or 0, shapes.text_width or 0) if shapes.text_width else None
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            get_model(config.model.kind).adapt(net)(x, torch.zeros(1), y=y, context=context)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "skips": len(find_sites(net)),
        "data": f"{config.data.name} {shapes.channels}×{shapes.size}×{shapes.size}",
        "batch_size": config.train.batch_size,
        "steps": config.train.steps,
        "flop_per_step": 3 * counter.get_total_flops() * config.train.batch_size,
    }


def expected_shapes(config: Config) -> Shapes:
    """Return the shapes of a dataset from the catalog, without loading it."""
    from scalelong.data import spec_of

    d = config.data
    spec = spec_of(d.name)
    size = d.image_size or spec.image_size
    return Shapes(
        channels=4 if d.vae else spec.channels,
        size=size // 8 if d.vae else size,
        label_rows=(spec.num_classes or 0) + (config.diffusion.drop > 0) if d.classes else None,
        text_tokens=d.text_tokens,
        text_width=TEXT_WIDTHS[d.text] if d.text else None,
    )


# ---------------------------------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Preset:
    """A named config and its purpose."""

    config: Config
    summary: str
    size: str  # "cpu" or "paper"


PRESETS: dict[str, Preset] = {}


def _add(name: str, size: str, summary: str, *shared: dict[str, Any], **sections: Any) -> None:
    """Add a preset: what it shares with others, and its own sections, which take precedence."""
    settings = {key: value for part in shared for key, value in part.items()} | sections
    PRESETS[name] = Preset(Config(preset=name, **settings), summary, size)


def _small_uvit(width: int, patch: int) -> Model:
    """Return a narrow U-ViT whose initial weights give it the signal scale of a 512-wide one."""
    std = 0.02 * math.sqrt(512 / width)
    return Model(patch_size=patch, embed_dim=width, depth=12, num_heads=4, init_std=std, mlp_time_embed=True)


_small_train = partial(Train, betas=(0.9, 0.99), weight_decay=0.01)
_DIGITS = {
    "model": _small_uvit(64, patch=2), "train": _small_train(steps=2000, batch_size=32, lr=1e-3),
    "ema": Ema(0.995, warmup=True), "validate": Validate(every=100, n=300), "sample": Sample(every=500),
}  # fmt: skip
_TINY = {
    "model": _small_uvit(128, patch=4), "train": _small_train(steps=10_000, lr=5e-4, warmup=200),
    "ema": Ema(0.999, warmup=True), "checkpoint": Checkpoint(every=1000), "validate": Validate(every=500),
}  # fmt: skip
_TINY_CIFAR = {
    **_TINY, "data": Data("cifar10", validation="test", flip=True), "sample": Sample(every=2000),
    "train": _small_train(steps=20_000, lr=5e-4, warmup=200),
}  # fmt: skip

_add("digits", "cpu", "8×8 digits, embedded: the default, two minutes on a laptop", _DIGITS)
_add(
    "digits-class", "cpu", "digits by class, with classifier-free guidance", _DIGITS, data=Data(classes=True),
    diffusion=Diffusion(drop=0.1), sample=Sample(every=500, n=60, guidance=2.0),
)  # fmt: skip
_add(
    "fashion-tiny", "cpu", "Fashion-MNIST 28×28", _TINY, model=_small_uvit(96, patch=4),
    data=Data("fashion-mnist", validation="test", flip=True), sample=Sample(every=1000),
)  # fmt: skip
_add("cifar10-tiny", "cpu", "real CIFAR-10 with a U-ViT that 2 cores can train", _TINY_CIFAR)
_add(
    "cifar10-tiny-unet", "cpu", "real CIFAR-10 with a small diffusers U-Net", _TINY_CIFAR, kappa=0.8,
    model=Model(kind="unet", unet="cifar10", channels=(32, 64, 64, 64), layers=2),
)  # fmt: skip
_add(
    "emoji-tiny", "cpu", "text to image: emoji from their names, by MiniLM", _TINY, kappa=0.8,
    data=Data("emoji", text="minilm", text_tokens=16), diffusion=Diffusion(drop=0.1),
    train=_small_train(steps=10_000, lr=1e-3, warmup=200), sample=Sample(every=1000, n=16, guidance=3.0),
)  # fmt: skip

_paper_train = partial(Train, clip=None, precision="fp16", log_every=100)
_PAPER = {"checkpoint": Checkpoint(10_000), "validate": Validate(10_000, n=2048), "sample": Sample(10_000)}
_SDE = Sample(10_000, sampler="euler-maruyama", steps=1000)
_CIFAR = {
    **_PAPER, "kappa": 0.5, "data": Data("cifar10", validation="test", flip=True),
    "train": _paper_train(steps=500_000, batch_size=128, lr=2e-4, betas=(0.99, 0.999), warmup=2500),
}  # fmt: skip
_IMAGENET = {
    **_PAPER, "kappa": 0.7, "data": Data("imagenet64", classes=True, flip=True),
    "train": _paper_train(steps=300_000, batch_size=1024, lr=3e-4, betas=(0.99, 0.99), warmup=5000),
}  # fmt: skip
_COCO = {
    **_PAPER, "kappa": 0.8, "diffusion": Diffusion("sd", drop=0.1),
    "data": Data("coco", text=CLIP, text_tokens=77, vae="stabilityai/sd-vae-ft-mse", latent_scale=0.2301),
    "train": _paper_train(steps=1_000_000, batch_size=256, lr=2e-4, betas=(0.9, 0.9), warmup=5000),
    "sample": Sample(10_000, sampler="dpm-solver++", steps=50, guidance=2.0),
}  # fmt: skip
_UVIT_M = Model(patch_size=4, embed_dim=768, depth=16, num_heads=12)
_UVIT_L = Model(patch_size=4, embed_dim=1024, depth=20, num_heads=16)

_add("cifar10-uvit-s", "paper", "U-ViT-S/2 on CIFAR-10, 44M", _CIFAR, sample=_SDE)
_add(
    "celeba64-uvit-s", "paper", "U-ViT-S/4 on CelebA 64, 44M", _PAPER, data=Data("celeba64", flip=True), kappa=0.5,
    train=_paper_train(steps=500_000, batch_size=128, lr=2e-4, betas=(0.99, 0.99), warmup=4000),
    model=Model(patch_size=4), sample=_SDE,
)  # fmt: skip
_add("imagenet64-uvit-m", "paper", "U-ViT-M/4 on ImageNet 64 by class, 131M", _IMAGENET, model=_UVIT_M)
_add("imagenet64-uvit-l", "paper", "U-ViT-L/4 on ImageNet 64 by class, 287M", _IMAGENET, model=_UVIT_L)
_add("coco-uvit-s", "paper", "U-ViT-S/2 on MS-COCO latents, text to image, 45M", _COCO)
_add("coco-uvit-s-deep", "paper", "U-ViT-S/2 (deep) on MS-COCO latents, 58M", _COCO, model=Model(depth=16))
_add(
    "cifar10-unet", "paper", "DDPM's U-Net on CIFAR-10, 35.7M, 12 skips", _CIFAR, diffusion=Diffusion("ddpm"),
    model=Model(kind="unet", unet="cifar10"), sample=Sample(10_000, sampler="ddpm", steps=1000),
)  # fmt: skip
_add(
    "imagenet64-unet", "paper", "U-Net on ImageNet 64 by class, 141M, 16 skips", _IMAGENET,
    diffusion=Diffusion("ddpm"), model=Model(kind="unet", unet="imagenet64"),
)  # fmt: skip
_add(
    "coco-unet", "paper", "U-Net on MS-COCO latents, text to image, 53M, 9 skips", _COCO,
    model=Model(kind="unet", unet="coco"),
)  # fmt: skip


if __name__ == "__main__":  # after a change of a preset: python -m scalelong.training.presets
    SIZES.write_text(json.dumps({name: size_of(p.config) for name, p in PRESETS.items()}, indent=1) + "\n", "utf-8")
