"""The config of a run: nested frozen dataclasses, set by dotted keys, stored as JSON and compared on resume.

This module does not import torch, so that presets can be listed and checked quickly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Union

from scalelong._objectives import (
    OBJECTIVES,
    PRECONDITIONS,
    PROCESSES,
    READ_BY,
    TARGETS,
    TIMES,
    VARIANCE_PRESERVING,
    WEIGHTS,
    objective_name,
)
from scalelong.errors import InvalidValueError, invalid, unknown
from scalelong.models.registry import Shapes, get_model
from scalelong.scaling import NoScaling, Scaling, SelfConditioning, compose, parse_scaling


@dataclass(frozen=True)
class DataConfig:
    """The training images. `classes` and `text` select what the network is conditioned on."""

    name: str = "digits"  # a dataset's name, a path or hf:NAME
    split: str = "train"  # the split to train on
    validation: str = "validation"  # the split to validate on, if there is one
    image_size: int | None = None  # crop to the centre square and resize to this many pixels; none: as prepared
    channels: int | None = None  # 1 for grey, 3 for colour; none: the dataset's own, or 3
    background: str | None = None  # colour behind transparent pixels, such as white
    holdout: float = 0.0  # share of train held out for validation, where the data has no such split
    skip_bad: bool = False  # skip unusable files instead of stopping
    hub_config: str | None = None  # configuration of a Hugging Face dataset
    image_column: str | None = None  # image column of a Hugging Face dataset
    label_column: str | None = None  # label column of a Hugging Face dataset or of metadata.csv
    caption_column: str | None = None  # caption column of a Hugging Face dataset or of metadata.csv
    flip: bool = False  # mirror random images left to right
    classes: bool = False  # condition the network on classes
    text: str | None = None  # condition it on captions by this encoder: minilm, a path, or a name on the hub
    text_tokens: int | None = None  # tokens per caption
    vae: str | None = None  # an autoencoder; the network then trains on its latents
    latent_scale: float | None = None  # factor on latents; none: the dataset's or the autoencoder's
    extra_noise: float = 0.0  # variance of extra Gaussian noise on the network's input in training (Fig. 3c)

    def options(self) -> dict[str, Any]:
        """Return the arguments of `scalelong.data.load` beside name and split: what was prepared is trained on."""
        names = ("image_size", "channels", "background", "holdout", "skip_bad")
        columns = ("image_column", "label_column", "caption_column")
        return {"config": self.hub_config, **{name: getattr(self, name) for name in names + columns}}


@dataclass(frozen=True)
class ModelConfig:
    """The network. `kind` is a key of `scalelong.models.registry.MODELS`."""

    kind: str = "uvit"  # a network of scalelong.models.registry.MODELS
    patch_size: int = 2  # of a U-ViT, in pixels
    embed_dim: int = 512  # of a U-ViT: width
    depth: int = 12  # of a U-ViT: number of blocks without the middle one
    num_heads: int = 8  # of a U-ViT: attention heads
    mlp_ratio: float = 4.0  # of a U-ViT: hidden width of an MLP over embed_dim
    qkv_bias: bool = False  # of a U-ViT: biases in attention
    mlp_time_embed: bool = False  # of a U-ViT: an MLP on the time embedding
    conv: bool = True  # of a U-ViT: a final 3×3 convolution
    init_std: float = 0.02  # of a U-ViT: standard deviation of initial weights
    base_head_width: int | None = None  # of a U-ViT: head width d with attention scale 1/√d; others √base/d (μP)
    unet: str | None = None  # one of the paper's U-Nets; none: one of any size
    channels: tuple[int, ...] | None = None  # of a U-Net, one per level
    layers: int | None = None  # of a U-Net, blocks per level
    attention: tuple[int, ...] | None = None  # of a U-Net: feature map sizes with attention, "()" for none
    dropout: float = 0.0  # of a U-Net: in its residual blocks
    options: dict[str, Any] = field(default_factory=dict)  # settings of your own network, JSON values only


AUTO = "auto"  # a part of the objective that its bundle sets


@dataclass(frozen=True)
class DiffusionConfig:
    """The objective (docs/objectives.md), and how often conditions are dropped for classifier-free guidance.

    `objective` sets the five parts below it; a part that is set as well replaces its own."""

    objective: str = "eps"  # what the network predicts: the name of a bundle of the next five settings
    process: str = AUTO  # the noise process or interpolant; auto: the objective's
    target: str = AUTO  # of the network's output; auto: the objective's
    times: str = AUTO  # density of training times; auto: the objective's
    weight: str = AUTO  # of a sample's loss by its noise; auto: the objective's
    precondition: str = AUTO  # of the network's input and output; auto: the objective's
    sigma_data: float = 0.5  # of precondition and weight edm: standard deviation of the data
    p_mean: float = -1.2  # of times log-normal: mean of ln σ
    p_std: float = 1.2  # of times log-normal: standard deviation of ln σ
    logit_mean: float = 0.0  # of times logit-normal: mean of logit t
    logit_std: float = 1.0  # of times logit-normal: standard deviation of logit t
    mode_scale: float = 1.29  # of times mode: how much they prefer the middle
    snr_gamma: float = 5.0  # of weights min-snr and soft-min-snr: where they saturate
    bias: float = 2.0  # of weight sigmoid: the log-SNR where it falls
    sigma_min: float = 0.002  # of process edm: smallest σ
    sigma_max: float = 80.0  # of process edm: largest σ
    rho: float = 7.0  # of process edm: σ^(1/ρ) is linear in time
    drop: float = 0.0  # share of training images without their condition, for classifier-free guidance

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("diffusion.objective", self.objective, OBJECTIVES)
        for part, value in OBJECTIVES[self.objective].items():
            if getattr(self, part) == AUTO:
                object.__setattr__(self, part, value)
        name = objective_name(self.target, self.precondition)
        object.__setattr__(self, "objective", name if name in OBJECTIVES else self.objective)

    def spec(self) -> dict[str, Any]:
        """Return the mapping that `scalelong.diffusion.get_objective` accepts."""
        values = {key: value for key, value in vars(self).items() if key not in ("objective", "drop")}
        numbers = {key: values.pop(key) for key in ("sigma_min", "sigma_max", "rho")}
        process = {"name": self.process, **(numbers if self.process == "edm" else {})}
        return {**values, "name": self.objective, "process": process}


def rebundled(values: dict[str, Any], objective: Any, kept: typing.Container[str] = ()) -> dict[str, Any]:
    """Return settings of `DiffusionConfig` for another objective: its parts, except those that are in `kept`.

    eps, x0 and v keep a variance-preserving process.
    """
    fits = values.get("process") in VARIANCE_PRESERVING and objective in ("eps", "x0", "v")
    reset = {part: AUTO for part in OBJECTIVES["eps"] if part not in kept and not (part == "process" and fits)}
    return {**values, **reset, "objective": objective}


@dataclass(frozen=True)
class TrainConfig:
    """Optimization. `batch_size` is the total batch of a step, over all processes and accumulation parts."""

    steps: int = 1000  # total number of steps
    batch_size: int = 64  # images per step, over all processes and accumulation parts
    lr: float = 2e-4  # peak learning rate of AdamW
    betas: tuple[float, float] = (0.99, 0.999)  # of AdamW
    weight_decay: float = 0.03  # of AdamW
    warmup: int = 100  # steps of linear learning-rate warm-up
    schedule: str = "constant"  # learning rate after the warm-up
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of lr
    decay_share: float = 0.2  # of the steps, at the end: the decay of warmup-stable-decay
    clip: float | None = 1.0  # largest gradient norm; none: no clipping
    accumulate: int = 1  # parts into which a batch is split to save memory
    parallel: str = "ddp"  # many processes: each has the network (ddp), or its share of it (fsdp)
    precision: str = "auto"  # of the forward and backward pass (autocast); auto: bf16 or fp16 on a GPU, fp32 elsewhere
    compile: str = "off"  # torch.compile: blocks (equal blocks share a graph), whole (the network is one), off
    gradient_checkpointing: bool = False  # recompute activations to save memory
    nonfinite: str = "stop"  # on a non-finite loss or gradient: stop, or skip the step
    log_every: int = 10  # steps between two lines of metrics.jsonl


@dataclass(frozen=True)
class MupConfig:
    """μP: initial weights and learning rates by role, relative to a base width and depth (`scalelong.mup`)."""

    base_width: int | None = None  # width at which lr was tuned: embed_dim, or a U-Net's first channels; none: no μP
    base_depth: int | None = None  # depth of a U-ViT at which lr was tuned (CompleteP); none: no rule for depth
    zero_output: bool = True  # start the output layer at zero


@dataclass(frozen=True)
class SelfConditioningConfig:
    """Features of one block condition the later ones (DDAE++, docs/representation.md), beside any scaling."""

    block: str | None = None  # such as mid_block; none: off. `scalelong probe` proposes one


@dataclass(frozen=True)
class DistillationConfig:
    """Contrastive self-distillation of pooled features (DDAE++, docs/representation.md). `weight=0` disables it."""

    weight: float = 0.0  # of the contrastive loss beside the denoising loss; 0: off
    block: str | None = None  # whose features; none: self_conditioning.block, or the middle block
    until: float = 0.25  # latest time of a view, as a share of the time range
    stride: int = 4  # every n-th image of a batch is used
    width: int = 128  # of the projectors
    temperature: float = 0.2  # τ of the contrastive loss


@dataclass(frozen=True)
class EmaConfig:
    """`warmup` shortens the average at first, so that a short run does not average untrained weights."""

    decay: float = 0.9999  # of the moving average of the weights
    warmup: bool = False  # average over fewer steps at first


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which a run resumes."""

    every: int = 500  # steps between two checkpoints
    keep: int = 2  # number of checkpoints to keep


@dataclass(frozen=True)
class ValidateConfig:
    """Validation loss on held-out images with fixed noise and times. `every=0` validates only at the end."""

    every: int = 0  # steps between two validations; 0: only at the end
    n: int = 512  # number of held-out images


@dataclass(frozen=True)
class SampleConfig:
    """Sample grids. `every=0` samples only at the end, `n=0` never."""

    every: int = 0  # steps between two sample grids; 0: only at the end
    n: int = 64  # number of images in a grid; 0: no grids
    sampler: str = "dpm-solver-fast"  # name of a sampler
    steps: int | None = None  # network evaluations per image; none: the sampler's own
    guidance: float = 1.0  # classifier-free guidance; 1: off
    clip_denoised: bool | None = None  # clamp the predicted image at every step; none: for pixels, not for latents


@dataclass(frozen=True)
class EvaluateConfig:
    """Fréchet distance of EMA samples during training, as in the paper's FID-10k curves. `every=0` disables it."""

    every: int = 0  # steps between two evaluations; 0: none
    n: int = 10000  # number of samples
    extractor: str = "inception"  # features of the Fréchet distance
    reference: str | None = None  # SPLIT or SPLIT:N of the data to compare with; none: the training split
    labels: str = "balanced"  # labels of the samples: every class in turn, or by frequency in the training data
    keep_best: bool = False  # keep the network with the lowest distance, for `scalelong evaluate --step best`


@dataclass(frozen=True)
class ProbeConfig:
    """Linear probe of the EMA network during training (docs/representation.md). `every=0` disables it."""

    every: int = 0  # steps between two probes; 0: none
    n: int = 2000  # labelled images of each split
    layers: str = "all"  # blocks, separated by commas; all: every block
    t: tuple[float, ...] | None = None  # times of the noise in the process's own unit; none: 1 % to 40 % of its range


@dataclass(frozen=True)
class MonitorConfig:
    """The stability monitor: a snapshot every `every` steps (0 disables it), `samples` images in its probe batch."""

    every: int = 10  # steps between two snapshots; 0: no monitor
    samples: int | None = None  # images in the probe batch; none: an eighth of the batch, between 4 and 8


@dataclass(frozen=True)
class Config:
    """All settings of a run. `scaling` also accepts a name or a dict; it is stored as a spec."""

    preset: str = "digits"  # the preset that this config started from
    seed: int = 0  # of weights, data order and noise
    scaling: Scaling = field(default_factory=NoScaling)  # of the long skips: a name or an object with a kind
    kappa: float = 0.7  # κ of `--scaling cs` without `--kappa`
    placement: str = "join"  # where κ acts: at the join, or after the norm behind it, which may cancel κ (after_norm)
    tracker: str | None = None  # also log to TensorBoard or W&B
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mup: MupConfig = field(default_factory=MupConfig)
    self_conditioning: SelfConditioningConfig = field(default_factory=SelfConditioningConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scaling", parse_scaling(self.scaling))
        _check(self)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "scaling": self.scaling.to_dict()}

    @property
    def applied_scaling(self) -> Scaling:
        """What is applied to the network: the scaling, and self-conditioning if it is on."""
        block = self.self_conditioning.block
        return self.scaling if block is None else compose(self.scaling, SelfConditioning(block))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

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


# What a resumed run may change: its length, and what it writes. Never what it learns.
FREE = (
    "train.steps",
    "train.log_every",
    "train.parallel",
    "train.accumulate",
    "train.gradient_checkpointing",
    "tracker",
    "checkpoint",
    "validate",
    "sample",
    "evaluate",
    "monitor",
    "probe",
)


def differences(stored: Config, new: Config) -> list[str]:
    """Return `key: stored → new` for every setting that a resumed run must not change.

    Precision `auto` and scaling `auto` continue with what the run started with.
    """
    before, after = flatten(stored.to_dict()), flatten(kept_kappa(new, stored).to_dict())
    if after["train.precision"] == "auto":
        after["train.precision"] = before["train.precision"]
    keys = [k for k in {**before, **after} if not any(k == free or k.startswith(free + ".") for free in FREE)]
    if after.get("train.precision") == "auto":  # stands for what the run started with
        keys.remove("train.precision")
    return [f"{k}: {before.get(k)!r} → {after.get(k)!r}" for k in sorted(keys) if before.get(k) != after.get(k)]


def measured_differently(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that a resumed run may change, but that change what is measured: key → (stored, new), if they differ."""
    keys = ("validate.n", "validate.every", "monitor.every", "monitor.samples")
    before, after = flatten(stored.to_dict()), flatten(new.to_dict())
    return {key: (before[key], after[key]) for key in keys if before[key] != after[key]}


def kept_kappa(new: Config, stored: Config) -> Config:
    """Return `new` with the kappa that scaling `auto` chose when the run of `stored` began."""
    if not new.scaling.unresolved or stored.scaling.kind != new.scaling.kind:
        return new
    return dataclasses.replace(new, scaling=stored.scaling, kappa=stored.kappa)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys by dots. Lists become tuples, so that JSON and Python values compare equal."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def override(config: Config, settings: dict[str, Any]) -> Config:
    """Return the config with dotted keys replaced.

    Args:
        config: The config to start from.
        settings: Values by key. Text is converted to the type of its key; `model.options.NAME` sets one option of your
            own network.

    Returns:
        The new config.

    Examples:
        >>> from scalelong.training import override, preset
        >>> override(preset("digits"), {"train.lr": "1e-3", "scaling": "ls"}).train.lr
        0.001
    """
    values, known = config.to_dict(), known_keys()
    change_objective(values, settings)
    for key, value in settings.items():
        if key.startswith("model.options."):
            options = convert(values["model"]["options"], dict[str, Any], "model.options")
            values["model"]["options"] = {**options, key.removeprefix("model.options."): _json_or_text(value)}
        elif key in known or key == "scaling":
            section, _, name = key.rpartition(".")
            (values[section] if section else values)[name] = value
        else:
            raise _unknown_setting(key)
    changed = Config.from_dict(values)
    check_read(changed, settings)
    return changed


def change_objective(values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take over what a new objective brings along, before the other settings: its process, times and a sampler."""
    if "diffusion.objective" not in settings:
        return
    kept = [key.removeprefix("diffusion.") for key in settings]
    values["diffusion"] = rebundled(values["diffusion"], settings["diffusion.objective"], kept)
    if values["diffusion"]["process"] == AUTO and values["sample"]["sampler"] in VP_ONLY:
        values["sample"] |= {"sampler": "dpm-solver++", "steps": None}


def _has_condition(config: Config) -> bool:
    return config.data.classes or config.data.text is not None


# Settings that only some configs read: which ones, in words and as a function.
_READ_WITH: dict[str, tuple[str, Callable[[Config], bool]]] = {
    "diffusion.drop": ("a run with data.classes or data.text", _has_condition),
    "sample.guidance": ("a run with data.classes or data.text", _has_condition),
    "data.text_tokens": ("a run with data.text", lambda config: config.data.text is not None),
    "data.latent_scale": ("a run with data.vae", lambda config: config.data.vae is not None),
    "train.min_lr_ratio": ("a train.schedule that decays", lambda config: config.train.schedule != "constant"),
    "train.decay_share": (
        "train.schedule=warmup-stable-decay", lambda config: config.train.schedule == "warmup-stable-decay",
    ),
    **dict.fromkeys(
        [f"distillation.{name}" for name in ("block", "until", "stride", "width", "temperature")],
        ("distillation.weight > 0", lambda config: config.distillation.weight > 0),
    ),
}  # fmt: skip


def check_read(changed: Config, keys: Iterable[str]) -> None:
    """Raise for a setting that the network, the objective or the rest of the config does not read."""
    used, defaults, values = get_model(changed.model.kind).settings, _defaults(), flatten(changed.to_dict())
    for key in keys:
        reader, reads = _READ_WITH.get(key, ("", bool))
        if reader and values[key] != defaults[key] and not reads(changed):
            raise InvalidValueError(f"{key} has no effect here: only {reader} reads it; leave it out")
        if used and key.startswith("model.") and key.split(".")[1] not in (*used, "kind", "options"):
            raise InvalidValueError(
                f"{key} has no effect on model.kind={changed.model.kind!r}, which reads {', '.join(used)}; leave it out"
            )
        readers = READ_BY.get(key.removeprefix("diffusion."), {}) if key.startswith("diffusion.") else {}
        if readers and not any(getattr(changed.diffusion, part) in names for part, names in readers.items()):
            needed = " or ".join(f"diffusion.{part}={name}" for part, names in readers.items() for name in names)
            raise InvalidValueError(f"{key} has no effect here: only {needed} reads it; leave it out")


@lru_cache
def _defaults() -> dict[str, Any]:
    return flatten(Config().to_dict())


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """`["train.lr=1e-3"]` → `{"train.lr": "1e-3"}`."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise invalid("--set", "dotted.key=value", pair)
        settings[key.strip()] = value.strip()
    return settings


def known_keys() -> list[str]:
    """Return every dotted key that `override` and `--set` accept."""
    keys = []
    for name, value in Config().to_dict().items():
        keys += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name]
    return [key for key in keys if key != "preset" and not key.startswith("scaling.")]


def _unknown_setting(key: str) -> InvalidValueError:
    from scalelong.runs.settings import unknown_setting

    return unknown_setting(key)


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise invalid(prefix.removesuffix(".") or "a config", "an object", values)
    hints, arguments = typing.get_type_hints(cls), {}
    for key, value in values.items():
        if key not in hints:
            raise _unknown_setting(f"{prefix}{key}")
        if hints[key] is Scaling:
            arguments[key] = value  # Config parses it
        elif dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, f"{key}.")
        else:
            arguments[key] = convert(value, hints[key], f"{prefix}{key}")
    return cls(**arguments)


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def convert(value: Any, kind: Any, key: str) -> Any:
    """Convert text or a JSON value to the declared type. Errors name the key and the expected type."""
    if key == "train.compile":  # was true or false
        switch = _WORDS.get(str(value).lower())
        value = value if switch is None else "whole" if switch else "off"
    try:
        return _converted(value, kind)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise invalid(key, description(kind), value) from None


def _converted(value: Any, kind: Any) -> Any:
    origin, inner, is_text = typing.get_origin(kind), typing.get_args(kind), isinstance(value, str)
    if origin in (Union, types.UnionType):  # kind | None
        empty = value is None or (is_text and value.lower() in ("none", "null", ""))
        return None if empty else _converted(value, inner[0])
    if origin is tuple:
        if is_text:
            value = [part for part in value.strip("()[] ").split(",") if part.strip()]
        if not isinstance(value, (list, tuple)) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
            raise TypeError
        return tuple(_converted(part, inner[0]) for part in value)
    if kind is bool and is_text:
        return _WORDS[value.lower()]
    if (kind is int and is_text) or (kind is float and not isinstance(value, bool)):
        value = kind(value)
    value = _json_or_text(value) if origin is dict else value
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, origin or kind):
        raise TypeError
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def _json_or_text(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def description(kind: Any) -> str:
    """Return a type in words."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a JSON object"}
    if typing.get_origin(kind) in (Union, types.UnionType):
        return " or ".join("none" if k is type(None) else description(k) for k in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "numbers separated by commas"
    return names.get(typing.get_origin(kind) or kind, str(kind))


_MINIMUM = {
    "seed": 0, "train.steps": 1, "train.batch_size": 1, "train.warmup": 0, "train.accumulate": 1, "train.log_every": 1,
    "checkpoint.every": 1, "checkpoint.keep": 1, "validate.every": 0, "validate.n": 1, "sample.every": 0, "sample.n": 0,
    "sample.steps": 1, "data.image_size": 1, "evaluate.every": 0, "evaluate.n": 4, "monitor.every": 0,
    "monitor.samples": 1, "model.channels": 1, "model.layers": 1, "model.attention": 1, "model.base_head_width": 1,
    "mup.base_width": 1, "mup.base_depth": 1, "probe.every": 0, "probe.n": 2, "distillation.stride": 1,
    "distillation.width": 1,
}  # fmt: skip
_POSITIVE = (
    "train.lr", "train.clip", "kappa", "model.init_std", "diffusion.sigma_data", "diffusion.p_std",
    "diffusion.logit_std", "diffusion.snr_gamma", "diffusion.sigma_min", "diffusion.sigma_max", "diffusion.rho",
    "distillation.temperature", "data.latent_scale",
)  # fmt: skip
_FRACTIONS = ("data.holdout", "model.dropout", "ema.decay", "train.betas", "diffusion.drop")
_NOT_NEGATIVE = ("train.weight_decay", "data.extra_noise", "distillation.weight")
_SHARES = ("train.min_lr_ratio", "train.decay_share", "distillation.until")
VP_ONLY = ("euler-maruyama", "euler-ode")  # samplers that need process vp
_SMALLEST = math.ulp(0.0)  # x >= _SMALLEST means x > 0
_CHOICES = {
    "placement": ("join", "after_norm"),
    "train.precision": ("auto", "fp32", "bf16", "fp16"),
    "train.parallel": ("ddp", "fsdp"),
    "train.compile": ("off", "blocks", "whole"),
    "train.nonfinite": ("stop", "skip"),
    "train.schedule": ("constant", "cosine", "linear", "warmup-stable-decay"),
    "diffusion.objective": tuple(OBJECTIVES),
    "diffusion.process": PROCESSES,
    "diffusion.target": TARGETS,
    "diffusion.times": TIMES,
    "diffusion.weight": WEIGHTS,
    "diffusion.precondition": PRECONDITIONS,
    "tracker": ("tensorboard", "wandb"),
    "evaluate.labels": ("balanced", "frequency"),
}


def allowed(key: str) -> str:
    """Return the values that a setting may have, "" if its type says it all."""
    if key in _MINIMUM:
        return f">= {_MINIMUM[key]}"
    if key in _CHOICES:
        return ", ".join(_CHOICES[key])
    texts = {"data.channels": "1, 3", **dict.fromkeys(_NOT_NEGATIVE, ">= 0"), **dict.fromkeys(_SHARES, "in [0, 1]")}
    return "> 0" if key in _POSITIVE else "in [0, 1)" if key in _FRACTIONS else texts.get(key, "")


def _check(config: Config) -> None:
    """Refuse values that no run can have. Optional settings may be None."""
    values = {key: value for key, value in flatten(config.to_dict()).items() if value is not None}
    limits: list[tuple[str, float, float, str]] = []
    limits += [(key, least, 2**63, f"an integer >= {least} and less than 2**63") for key, least in _MINIMUM.items()]
    limits += [(key, _SMALLEST, math.inf, "a number > 0") for key in _POSITIVE]
    limits += [(key, 0, 1, "in [0, 1)") for key in _FRACTIONS]
    limits += [(key, 0, math.inf, "a number >= 0") for key in _NOT_NEGATIVE]
    limits += [(key, 0, math.nextafter(1, 2), "in [0, 1]") for key in _SHARES]
    for key, low, high, expected in limits:
        value = values.get(key, low)
        if not all(low <= number < high for number in (value if isinstance(value, tuple) else (value,))):
            raise invalid(key, expected, value)
    for key, options in _CHOICES.items():
        if key in values and values[key] not in options:
            raise unknown(key, values[key], options)
    if config.data.channels not in (None, 1, 3):
        raise invalid("data.channels", "1 (grey) or 3 (RGB)", config.data.channels)
    if config.data.vae and config.sample.clip_denoised:
        raise invalid("sample.clip_denoised", "false for latents (data.vae), which have no fixed range", True)
    d = config.diffusion
    if d.sigma_min >= d.sigma_max:
        expected = "diffusion.sigma_min < diffusion.sigma_max"
        raise invalid("diffusion.sigma_min, diffusion.sigma_max", expected, (d.sigma_min, d.sigma_max))
    if d.precondition == "edm" and d.target != "x0":
        raise invalid("diffusion.target", "x0 with diffusion.precondition=edm, which defines the output", d.target)
    _ = config.applied_scaling  # raises what cannot be composed
    get_model(config.model.kind)
    try:
        json.dumps(config.model.options)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"model.options must contain JSON values only: {error}") from None
    if config.data.classes and config.data.text:
        raise InvalidValueError(
            f"data.classes=true and data.text={config.data.text!r} exclude each other; "
            "set data.classes=false or data.text=none"
        )
