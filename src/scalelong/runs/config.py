"""What a run is: nested frozen dataclasses, set by dotted keys, compared on resume, stored as JSON.

Nothing here imports torch, so that presets can be listed and checked at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Union

from scalelong.errors import RunError, ScaleLongError, unknown
from scalelong.models.registry import Shapes, get_model


@dataclass(frozen=True)
class DataConfig:
    """Where images come from. `classes` and `text` say what of them the network is told."""

    name: str = "digits"
    split: str = "train"
    validation: str = "validation"
    image_size: int | None = None
    flip: bool = False
    classes: bool = False
    text: str | None = None  # a text encoder: "minilm", a path, or a name on the hub
    text_tokens: int | None = None
    vae: str | None = None  # an autoencoder: train on its latents
    latent_scale: float | None = None
    skip_bad: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """The network: a U-ViT by its sizes, or a U-Net by its name in `scalelong.models.unet`."""

    kind: str = "uvit"
    patch_size: int = 2
    embed_dim: int = 512
    depth: int = 12
    num_heads: int = 8
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    mlp_time_embed: bool = False
    conv: bool = True
    init_std: float = 0.02
    unet: str | None = None
    channels: tuple[int, ...] | None = None  # of a U-Net, one number a level
    layers: int | None = None  # blocks a level of a U-Net
    options: dict[str, Any] = field(default_factory=dict)  # JSON-ready settings of a network of your own


@dataclass(frozen=True)
class DiffusionConfig:
    """The noise process, and how often a condition is dropped for classifier-free guidance."""

    process: str = "vp"
    drop: float = 0.0


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation. `batch_size` is the whole batch of a step, over all processes and accumulation."""

    steps: int = 1000
    batch_size: int = 64
    lr: float = 2e-4
    betas: tuple[float, float] = (0.99, 0.999)
    weight_decay: float = 0.03
    warmup: int = 100
    clip: float | None = 1.0
    accumulate: int = 1
    precision: str = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    nonfinite: str = "stop"
    log_every: int = 10


@dataclass(frozen=True)
class EmaConfig:
    """`warmup` averages over fewer steps at first, so that a short run's average is of trained weights."""

    decay: float = 0.9999
    warmup: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    keep: int = 2


@dataclass(frozen=True)
class ValidateConfig:
    """Validation loss on held-out images with fixed noise and times; 0 switches it off (but for the end)."""

    every: int = 0
    n: int = 512


@dataclass(frozen=True)
class SampleConfig:
    """Sample grids on the way and at the end; `every` 0 leaves only the end, `n` 0 none at all."""

    every: int = 0
    n: int = 64
    sampler: str = "dpm-solver-fast"
    steps: int | None = None
    guidance: float = 1.0


@dataclass(frozen=True)
class EvaluateConfig:
    """Fréchet distance of EMA samples on the way, as the paper's FID-10k curves; 0 switches it off."""

    every: int = 0
    n: int = 10000
    extractor: str = "inception"


@dataclass(frozen=True)
class MonitorConfig:
    """The stability monitor: every how many steps it looks (0 switches it off), and how many images its probe has."""

    every: int = 10
    samples: int | None = None  # None: an eighth of the batch, from 4 to 8


@dataclass(frozen=True)
class Config:
    """Everything that a run is made of."""

    preset: str = "digits"
    seed: int = 0
    scaling: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    kappa: float = 0.7  # the base of CS where `--scaling cs` names none
    tracker: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def __post_init__(self) -> None:
        _check(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Config:
        return _build(Config, values, "")


@dataclass(frozen=True)
class Facts:
    """What sampling from a trained network needs beside its config. Stored in config.json."""

    shapes: Shapes
    class_names: tuple[str, ...] | None = None

    @property
    def null_y(self) -> int | None:
        """The label for "any class", one past the last class, if the network was trained with it."""
        rows, names = self.shapes.label_rows, self.class_names
        return len(names) if rows and names and rows > len(names) else None

    def to_dict(self) -> dict[str, Any]:
        names = self.class_names
        return {"shapes": dataclasses.asdict(self.shapes), "class_names": list(names) if names else None}

    @staticmethod
    def from_dict(record: dict[str, Any]) -> Facts:
        try:
            names = record.get("class_names")
            return Facts(Shapes(**record["shapes"]), tuple(names) if names else None)
        except (KeyError, TypeError) as error:
            raise RunError(f"the run's config.json has no valid shapes and class_names: {error}") from error


# What may differ when a run goes on: its length, what is written and looked at, never what is learned.
FREE = ("train.steps", "train.log_every", "tracker", "checkpoint", "validate", "sample", "evaluate", "monitor")


def differences(stored: Config, asked: Config) -> list[str]:
    """`key: stored → asked` for every setting that a resumed run may not change."""
    before, after = flatten(stored.to_dict()), flatten(asked.to_dict())
    keys = [k for k in {**before, **after} if not any(k == free or k.startswith(free + ".") for free in FREE)]
    return [f"{k}: {before.get(k)!r} → {after.get(k)!r}" for k in sorted(keys) if before.get(k) != after.get(k)]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; lists as tuples, so that JSON and Python compare."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def override(config: Config, settings: dict[str, Any]) -> Config:
    """The config with dotted keys set: `override(config, {"train.lr": "1e-3"})`. Text is read as the key's type."""
    for key, value in settings.items():
        config = _set(config, key.split("."), value, key)
    return config


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`["train.lr=1e-3"]` → `{"train.lr": "1e-3"}`."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ScaleLongError(f"--set takes dotted.key=value, not {pair!r}")
        settings[key.strip()] = value.strip()
    return settings


def known_keys() -> list[str]:
    """Every dotted key that can be set."""
    keys = []
    for f in dataclasses.fields(Config):
        section = _SECTIONS.get(f.name)
        keys += [f"{f.name}.{inner.name}" for inner in dataclasses.fields(section)] if section else [f.name]
    return [key for key in keys if key not in ("preset", "scaling")]


_SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "diffusion": DiffusionConfig,
    "train": TrainConfig,
    "ema": EmaConfig,
    "checkpoint": CheckpointConfig,
    "validate": ValidateConfig,
    "sample": SampleConfig,
    "evaluate": EvaluateConfig,
    "monitor": MonitorConfig,
}


def _set(target: Any, path: list[str], value: Any, whole: str) -> Any:
    name = path[0]
    fields = {f.name for f in dataclasses.fields(target)}
    if name not in fields or (len(path) > 1) != (name in _SECTIONS and isinstance(target, Config)):
        raise unknown("setting", whole, known_keys())
    if len(path) > 1:
        return dataclasses.replace(target, **{name: _set(getattr(target, name), path[1:], value, whole)})
    kind = typing.get_type_hints(type(target))[name]
    return dataclasses.replace(target, **{name: convert(value, kind, whole)})


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ScaleLongError(f"a config is a JSON object; {prefix or 'it'} is {values!r}")
    hints, arguments = typing.get_type_hints(cls), {}
    for key, value in values.items():
        if key not in hints:
            raise unknown("setting", f"{prefix}{key}", known_keys())
        section = _SECTIONS.get(key) if cls is Config else None
        if section:
            arguments[key] = _build(section, value, f"{prefix}{key}.")
        else:
            arguments[key] = convert(value, hints[key], f"{prefix}{key}")
    return cls(**arguments)


def convert(value: Any, kind: Any, key: str) -> Any:
    """Read text (or JSON values) as the declared type; the error names the key and what it takes."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            if type(None) in options:
                return None
            raise ScaleLongError(f"{key} takes {_name_of(kind)}, not {value!r}")
        kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            value = [part for part in value.strip("()[] ").split(",") if part.strip()]
        inner = typing.get_args(kind)
        if not isinstance(value, (list, tuple)) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
            raise ScaleLongError(f"{key} takes {_name_of(kind)}, not {value!r}")
        return tuple(convert(part, inner[0], key) for part in value)
    if kind is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            with suppress(ValueError):
                return int(value)
    elif kind is float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    elif kind is str:
        if isinstance(value, str):
            return value
    elif isinstance(value, dict):
        return value
    raise ScaleLongError(f"{key} takes {_name_of(kind)}, not {value!r}")


def _name_of(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "an object"}
    if typing.get_origin(kind) in (Union, types.UnionType):
        return " or ".join("none" if k is type(None) else _name_of(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "numbers with commas between them"
    return names.get(typing.get_origin(kind) or kind, str(kind))


def _check(config: Config) -> None:
    """Values that no run can have, by name."""
    t = config.train
    at_least = {
        "train.steps": (t.steps, 1),
        "train.batch_size": (t.batch_size, 1),
        "train.warmup": (t.warmup, 0),
        "train.accumulate": (t.accumulate, 1),
        "train.log_every": (t.log_every, 1),
        "checkpoint.every": (config.checkpoint.every, 1),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "validate.every": (config.validate.every, 0),
        "validate.n": (config.validate.n, 1),
        "sample.every": (config.sample.every, 0),
        "sample.n": (config.sample.n, 0),
        "evaluate.every": (config.evaluate.every, 0),
        "evaluate.n": (config.evaluate.n, 2),
        "monitor.every": (config.monitor.every, 0),
        "seed": (config.seed, 0),
    }
    if config.monitor.samples is not None:
        at_least["monitor.samples"] = (config.monitor.samples, 1)
    for key, (value, least) in at_least.items():
        if value < least:
            raise ScaleLongError(f"{key} is at least {least}, not {value}")
        if value >= 2**63:
            raise ScaleLongError(f"{key} is less than 2**63, not {value}")
    positive = {"train.lr": t.lr, "kappa": config.kappa, "model.init_std": config.model.init_std}
    if t.clip is not None:
        positive["train.clip"] = t.clip
    for key, number in positive.items():
        if not number > 0:
            raise ScaleLongError(f"{key} is a number above 0, not {number}")
    shares = {"ema.decay": config.ema.decay, "train.betas": max(t.betas), "diffusion.drop": config.diffusion.drop}
    for key, number in shares.items():
        if not 0 <= number < 1:
            raise ScaleLongError(f"{key} is in [0, 1), not {number}")
    if t.weight_decay < 0 or min(t.betas) < 0:
        raise ScaleLongError(f"train.weight_decay and train.betas are not negative: {t.weight_decay}, {t.betas}")
    choices = {
        "train.precision": (t.precision, ("fp32", "bf16", "fp16")),
        "train.nonfinite": (t.nonfinite, ("stop", "skip")),
        "diffusion.process": (config.diffusion.process, ("vp", "ddpm", "sd")),
    }
    if config.tracker is not None:
        choices["tracker"] = (config.tracker, ("tensorboard", "wandb"))
    for key, (chosen, options) in choices.items():
        if chosen not in options:
            raise unknown(key, chosen, options)
    get_model(config.model.kind)
    if config.data.classes and config.data.text:
        raise ScaleLongError("data.classes and data.text: a network is told the class or the text, not both")


def to_json(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2)
