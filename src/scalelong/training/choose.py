"""From the words of a command to a resolved config and a run folder."""

from __future__ import annotations

import re
import typing
from dataclasses import fields, replace
from pathlib import Path

from scalelong.errors import unknown
from scalelong.runs.config import Config, convert, override, parse_settings
from scalelong.scaling import Scaling, parse_scaling
from scalelong.training.presets import preset as preset_config

OPTION = "scaling."  # settings of this prefix are the scaling's own: scaling.reduction=4, scaling.tau=0.3


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
    asked = parse_settings(settings or [])
    config = override(config, {key: value for key, value in asked.items() if not key.startswith(OPTION)})
    if scaling is None and kappa is not None:
        scaling = "cs"
    spec = choose_scaling(config, scaling, kappa)
    spec = _with_options(spec, {key: value for key, value in asked.items() if key.startswith(OPTION)})
    return replace(config, scaling=spec.to_dict())


def choose_scaling(config: Config, scaling: str | None, kappa: float | None = None) -> Scaling:
    """A spec from a short name; `cs` without κ takes the preset's."""
    if scaling is None:
        return parse_scaling(config.scaling)
    if scaling in ("cs", "cs-reverse"):
        return parse_scaling(scaling, kappa=config.kappa if kappa is None else kappa)
    return parse_scaling(scaling, kappa=kappa if scaling == "uniform" else None)


def _with_options(spec: Scaling, settings: dict[str, str]) -> Scaling:
    """The spec with `scaling.reduction=4`, `scaling.tau=0.3`, … set; they are checked as its own fields are."""
    hints = typing.get_type_hints(type(spec))
    for key, text in settings.items():
        name = key.removeprefix(OPTION)
        if name not in {f.name for f in fields(spec)}:
            raise unknown(
                f"setting of scaling {spec.kind!r}:", key, [OPTION + f.name for f in fields(spec)] or ["none"]
            )
        spec = replace(spec, **{name: convert(text, hints[name], key)})
    return spec


def default_out(config: Config) -> Path:
    """runs/PRESET-SCALING-seedN."""
    name = f"{config.preset}-{parse_scaling(config.scaling).label}-seed{config.seed}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9._-]+", "-", name)
