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
from scalelong.runs.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DiffusionConfig,
    EmaConfig,
    EvaluateConfig,
    ModelConfig,
    SampleConfig,
    TrainConfig,
    ValidateConfig,
    convert,
    override,
    parse_settings,
)
from scalelong.scaling import Scaling, parse_scaling


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
    if scaling is None:
        spec = config.scaling if kappa is None else parse_scaling("cs", kappa=kappa)
    elif scaling in ("cs", "cs-reverse"):
        spec = parse_scaling(scaling, kappa=config.kappa if kappa is None else kappa)
    else:
        spec = parse_scaling(scaling, kappa=kappa if scaling == "uniform" else None)
    return replace(config, scaling=_with_fields(spec, own))


def _with_fields(spec: Scaling, settings: dict[str, str]) -> Scaling:
    """Return the spec with `scaling.reduction=4`, `scaling.tau=0.3` and the like set."""
    hints, names = typing.get_type_hints(type(spec)), [f.name for f in fields(spec)]
    for key, text in settings.items():
        name = key.removeprefix("scaling.")
        if name not in names:
            raise unknown(f"setting of scaling {spec.kind!r}:", key, [f"scaling.{n}" for n in names] or ["none"])
        spec = replace(spec, **{name: convert(text, hints[name], key)})
    return spec


def default_out(config: Config) -> Path:
    """Return runs/PRESET-SCALING-seedN."""
    name = f"{config.preset}-{config.scaling.label}-seed{config.seed}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name)


# ------------------------------------------------------------------------------------------------ sizes

SIZES = Path(__file__).with_name("preset_sizes.json")
TEXT_WIDTHS = {"minilm": 384, "openai/clip-vit-large-patch14": 768}


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


def _cpu(name: str, summary: str, **sections: Any) -> None:
    PRESETS[name] = Preset(Config(preset=name, **sections), summary, "cpu")


def _paper(name: str, summary: str, **sections: Any) -> None:
    defaults = {
        "ema": EmaConfig(0.9999),
        "checkpoint": CheckpointConfig(every=10_000, keep=2),
        "validate": ValidateConfig(every=10_000, n=2048),
        "sample": SampleConfig(every=10_000, n=64),
        "evaluate": EvaluateConfig(every=0, n=10_000),
    }
    PRESETS[name] = Preset(Config(preset=name, **{**defaults, **sections}), summary, "paper")


def small_std(width: int) -> float:
    """Return the initial standard deviation that gives a narrow U-ViT the signal scale of a 512-wide one."""
    return 0.02 * math.sqrt(512 / width)


def _small_uvit(width: int, patch: int) -> ModelConfig:
    std = small_std(width)
    return ModelConfig(patch_size=patch, embed_dim=width, depth=12, num_heads=4, init_std=std, mlp_time_embed=True)


_small_train = partial(TrainConfig, betas=(0.9, 0.99), weight_decay=0.01)
_DIGITS: dict[str, Any] = {
    "model": _small_uvit(64, patch=2), "kappa": 0.7, "ema": EmaConfig(0.995, warmup=True),
    "train": _small_train(steps=2000, batch_size=32, lr=1e-3, warmup=100),
    "checkpoint": CheckpointConfig(every=500), "validate": ValidateConfig(every=100, n=300),
}  # fmt: skip
_TINY: dict[str, Any] = {
    "ema": EmaConfig(0.999, warmup=True), "checkpoint": CheckpointConfig(every=1000, keep=2),
    "validate": ValidateConfig(every=500, n=512),
}  # fmt: skip
_TINY_CIFAR = {
    "data": DataConfig("cifar10", validation="test", flip=True), "sample": SampleConfig(every=2000, n=64),
    "train": _small_train(steps=20_000, batch_size=64, lr=5e-4, warmup=200), **_TINY,
}  # fmt: skip

_cpu(
    "digits", "8×8 digits, embedded: the default, two minutes on a laptop", data=DataConfig("digits"),
    sample=SampleConfig(every=500, n=64), **_DIGITS,
)  # fmt: skip
_cpu(
    "digits-class", "digits by class, with classifier-free guidance", data=DataConfig("digits", classes=True),
    diffusion=DiffusionConfig("vp", drop=0.1), sample=SampleConfig(every=500, n=60, guidance=2.0), **_DIGITS,
)  # fmt: skip
_cpu(
    "fashion-tiny", "Fashion-MNIST 28×28", data=DataConfig("fashion-mnist", validation="test", flip=True),
    model=_small_uvit(96, patch=4), kappa=0.7, sample=SampleConfig(every=1000, n=64),
    train=_small_train(steps=10_000, batch_size=64, lr=5e-4, warmup=200), **_TINY,
)  # fmt: skip
_cpu(
    "cifar10-tiny", "real CIFAR-10 with a U-ViT that 2 cores can train",
    model=_small_uvit(128, patch=4), kappa=0.7, **_TINY_CIFAR,
)  # fmt: skip
_cpu(
    "cifar10-tiny-unet", "real CIFAR-10 with a small diffusers U-Net",
    model=ModelConfig(kind="unet", unet="cifar10", channels=(32, 64, 64, 64), layers=2), kappa=0.8, **_TINY_CIFAR,
)  # fmt: skip
_cpu(
    "emoji-tiny", "text to image: emoji from their names, by MiniLM",
    data=DataConfig("emoji", text="minilm", text_tokens=16), model=_small_uvit(128, patch=4), kappa=0.8,
    diffusion=DiffusionConfig("vp", drop=0.1), sample=SampleConfig(every=1000, n=16, guidance=3.0),
    train=_small_train(steps=10_000, batch_size=64, lr=1e-3, warmup=200), **_TINY,
)  # fmt: skip

_paper_train = partial(TrainConfig, weight_decay=0.03, clip=None, precision="fp16", log_every=100)
_SDE = SampleConfig(every=10_000, n=64, sampler="euler-maruyama", steps=1000)
_CIFAR = {
    "train": _paper_train(steps=500_000, batch_size=128, lr=2e-4, betas=(0.99, 0.999), warmup=2500), "kappa": 0.5,
    "data": DataConfig("cifar10", validation="test", flip=True),
}  # fmt: skip
_IMAGENET = {
    "train": _paper_train(steps=300_000, batch_size=1024, lr=3e-4, betas=(0.99, 0.99), warmup=5000), "kappa": 0.7,
    "data": DataConfig("imagenet64", classes=True, flip=True),
}  # fmt: skip
_COCO = {
    "train": _paper_train(steps=1_000_000, batch_size=256, lr=2e-4, betas=(0.9, 0.9), warmup=5000), "kappa": 0.8,
    "data": DataConfig(
        "coco", text="openai/clip-vit-large-patch14", text_tokens=77, vae="stabilityai/sd-vae-ft-mse",
        latent_scale=0.2301,
    ),
    "diffusion": DiffusionConfig("sd", drop=0.1),
    "sample": SampleConfig(every=10_000, n=64, sampler="dpm-solver++", steps=50, guidance=2.0),
}  # fmt: skip

_paper("cifar10-uvit-s", "U-ViT-S/2 on CIFAR-10, 44M", model=ModelConfig(patch_size=2), sample=_SDE, **_CIFAR)
_paper(
    "celeba64-uvit-s", "U-ViT-S/4 on CelebA 64, 44M", data=DataConfig("celeba64", flip=True), kappa=0.5,
    train=_paper_train(steps=500_000, batch_size=128, lr=2e-4, betas=(0.99, 0.99), warmup=4000),
    model=ModelConfig(patch_size=4), sample=_SDE,
)  # fmt: skip
_paper(
    "imagenet64-uvit-m", "U-ViT-M/4 on ImageNet 64 by class, 131M",
    model=ModelConfig(patch_size=4, embed_dim=768, depth=16, num_heads=12), **_IMAGENET,
)  # fmt: skip
_paper(
    "imagenet64-uvit-l", "U-ViT-L/4 on ImageNet 64 by class, 287M",
    model=ModelConfig(patch_size=4, embed_dim=1024, depth=20, num_heads=16), **_IMAGENET,
)  # fmt: skip
_paper("coco-uvit-s", "U-ViT-S/2 on MS-COCO latents, text to image, 45M", model=ModelConfig(patch_size=2), **_COCO)
_paper("coco-uvit-s-deep", "U-ViT-S/2 (deep) on MS-COCO latents, 58M", model=ModelConfig(depth=16), **_COCO)
_paper(
    "cifar10-unet", "DDPM's U-Net on CIFAR-10, 35.7M, 12 skips", model=ModelConfig(kind="unet", unet="cifar10"),
    diffusion=DiffusionConfig("ddpm"), sample=SampleConfig(every=10_000, n=64, sampler="ddpm", steps=1000), **_CIFAR,
)  # fmt: skip
_paper(
    "imagenet64-unet", "U-Net on ImageNet 64 by class, 141M, 16 skips", diffusion=DiffusionConfig("ddpm"),
    model=ModelConfig(kind="unet", unet="imagenet64"), **_IMAGENET,
)  # fmt: skip
_paper(
    "coco-unet", "U-Net on MS-COCO latents, text to image, 53M, 9 skips", model=ModelConfig(kind="unet", unet="coco"),
    **_COCO,
)  # fmt: skip


if __name__ == "__main__":  # after a change of a preset: python -m scalelong.training.presets
    SIZES.write_text(json.dumps({name: size_of(p.config) for name, p in PRESETS.items()}, indent=1) + "\n", "utf-8")
