"""From the words of a command to a resolved config and a run folder."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from scalelong.scaling import Scaling, parse_scaling
from scalelong.training.config import Config, override, parse_settings
from scalelong.training.presets import preset as preset_config


def choose(
    preset: str,
    *,
    scaling: str | None = None,
    kappa: float | None = None,
    data: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    settings: list[str] | None = None,
) -> Config:
    """A preset with what the user asked for on top; `--set` has the last word."""
    config = preset_config(preset)
    given = {"data.name": data, "train.steps": steps, "train.batch_size": batch_size, "seed": seed, "kappa": kappa}
    config = override(config, {key: value for key, value in given.items() if value is not None})
    config = override(config, parse_settings(settings or []))
    if scaling is None and kappa is not None:
        scaling = "cs"
    spec = choose_scaling(config, scaling, kappa)
    return replace(config, scaling=spec.to_dict())


def choose_scaling(config: Config, scaling: str | None, kappa: float | None = None) -> Scaling:
    """A spec from a short name; `cs` without κ takes the preset's."""
    if scaling is None:
        return parse_scaling(config.scaling)
    if scaling in ("cs", "cs-reverse"):
        return parse_scaling(scaling, kappa=config.kappa if kappa is None else kappa)
    return parse_scaling(scaling, kappa=kappa if scaling == "uniform" else None)


def scaling_label(scaling: dict[str, object]) -> str:
    """A short name for folders and tables: none, uniform, cs-0.7, cs-reverse-0.7, ls, ls-ie, …"""
    spec = parse_scaling(dict(scaling))
    if spec.kind == "cs":
        reverse = "-reverse" if scaling.get("reverse") else ""
        return f"cs{reverse}-{scaling['kappa']:g}"
    if spec.kind == "uniform" and spec != parse_scaling("uniform"):
        return f"uniform-{scaling['value']:g}"
    if spec.kind == "ls":
        plain = parse_scaling("ls").to_dict()
        changed = [f"{key}-{value}" for key, value in spec.to_dict().items() if plain[key] != value]
        return "-".join(["ls", *changed])
    if spec.kind == "stable":
        return f"stable-{scaling['tau']:g}"
    return spec.kind


def default_out(config: Config) -> Path:
    """runs/PRESET-SCALING-seedN."""
    name = f"{config.preset}-{scaling_label(config.scaling)}-seed{config.seed}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name)
