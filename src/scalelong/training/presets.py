"""Presets, and the config of a command: `choose("digits", scaling="cs", steps=500)`.

There is one preset per row of the paper's table at full size, and small ones that train on a CPU.
"""

import json
import re
import tomllib
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidValueError, unknown
from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import Config, convert, flatten, override, parse_settings
from scalelong.scaling import parse_scaling


def preset(name: str) -> Config:
    """Return the config of a preset.

    Args:
        name: A name that `scalelong presets` lists.

    Returns:
        The config.

    Examples:
        >>> from scalelong.training import preset
        >>> preset("cifar10-uvit-s").train.lr
        0.0002
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name].config


def choose(
    start: str | Config,
    *,
    scaling: str | None = None,
    kappa: float | None = None,
    data: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    objective: str | None = None,
    settings: list[str] | None = None,
) -> Config:
    """Return a preset, or another config to start from, with a command's options.

    `settings` (`--set`) take precedence over the other options.
    """
    options = {"data.name": data, "train.steps": steps, "train.batch_size": batch_size, "seed": seed, "kappa": kappa}
    options["diffusion.objective"] = objective
    pairs = parse_settings(settings or [])
    if "data.name" in pairs:
        from scalelong.data.prepare import absolute_name

        pairs["data.name"] = absolute_name(pairs["data.name"])
    word = pairs.pop("scaling", scaling)
    own = {key: value for key, value in pairs.items() if key.startswith("scaling.")}  # fields of the scaling
    config = preset(start) if isinstance(start, str) else start
    config = override(config, {key: value for key, value in options.items() if value is not None})
    config = override(config, {key: value for key, value in pairs.items() if key not in own})
    if word is None and kappa is not None and config.scaling.is_identity:
        word = "cs"
    if (kappa is None or "kappa" in pairs) and word is not None and word.strip().lower() in ("cs", "cs-reverse"):
        kappa = config.kappa
    spec = config.scaling if word is None else parse_scaling(word, kappa=kappa)
    if word is None and (kappa is not None or ("kappa" in pairs and spec.kappa_option == "kappa")):
        if spec.kappa_option is None:
            raise InvalidValueError(f"--kappa {kappa:g} needs a scaling with κ (cs, cs-reverse, uniform), got {spec}")
        spec = replace(spec, **{spec.kappa_option: config.kappa})
    own_kappa = getattr(spec, spec.kappa_option) if spec.kappa_option else None
    if (
        word is not None and ":" in word and isinstance(own_kappa, float)
    ):  # cs:0.5 is the same config as cs with kappa=0.5
        config = replace(config, kappa=own_kappa)
    hints, names = typing.get_type_hints(type(spec)), [f.name for f in fields(spec) if f.init]
    for key, text in own.items():
        field = key.removeprefix("scaling.")
        if field not in names:
            raise unknown(f"setting of scaling {spec.kind!r}:", key, [f"scaling.{n}" for n in names] or ["none"])
        spec = replace(spec, **{field: convert(text, hints[field], key)})
    return replace(config, scaling=spec)


def default_out(config: Config) -> Path:
    """Return runs/PRESET-SCALING-seedN, with the name of the data where the data picked the network."""
    name = f"{start_name(config)}-{config.scaling.label}-seed{config.seed}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def start_name(config: Config) -> str:
    """Return the name of the preset, or that of the data which picked the network, and an objective of its own."""
    usual = PRESETS[config.preset].config if config.preset in PRESETS else Config()
    own = config.diffusion.objective
    suffix = "" if own == usual.diffusion.objective else f"-{own}"
    if config.preset != AUTO:
        return config.preset + suffix
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.data.name).name).strip(".-") or "data") + suffix


AUTO = "auto"  # instead of a preset's name: picked for the data
SIZES = Path(__file__).with_name("preset_sizes.json")
FILE = Path(__file__).with_name("presets.toml")
TEXT_WIDTHS = {"words": 64, "minilm": 384, "openai/clip-vit-large-patch14": 768}


def sizes() -> dict[str, dict[str, Any]]:
    """Return `size_of` every preset from a stored file, which takes no time. A test keeps the file correct.

    Those of the paper's size also have "activations": see `scalelong.training.memory.measure`.
    """
    return dict(json.loads(SIZES.read_text(encoding="utf-8")))


def size_of(config: Config, shapes: Shapes | None = None) -> dict[str, Any]:
    """Count parameters, long skips and FLOP per training step (one forward pass, a backward pass costs two)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from scalelong.runs.run import build_network
    from scalelong.skips import find_sites

    shapes = shapes or expected_shapes(config)
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


@dataclass(frozen=True)
class Preset:
    """A named config and its purpose."""

    config: Config
    summary: str
    size: str  # "cpu" or "paper"


PRESETS: dict[str, Preset] = {}
for _name, _entry in tomllib.loads(FILE.read_text(encoding="utf-8")).items():
    _summary, _size, _like = _entry.pop("summary"), _entry.pop("size"), _entry.pop("like", None)
    _start = PRESETS[_like].config if _like else Config()
    PRESETS[_name] = Preset(override(replace(_start, preset=_name), flatten(_entry)), _summary, _size)


def _sizes() -> dict[str, dict[str, Any]]:
    """Measure every preset: its size, and the activations of those that need a GPU."""
    from scalelong.training.memory import measure

    each = {name: size_of(p.config) for name, p in PRESETS.items()}
    for name, p in PRESETS.items():
        if p.size == "paper":
            each[name]["activations"] = measure(p.config)
    return each


if __name__ == "__main__":  # after a change of a preset: python -m scalelong.training.presets
    SIZES.write_text(json.dumps(_sizes(), indent=1) + "\n", "utf-8")
