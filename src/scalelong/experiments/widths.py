"""One preset at several widths, in the standard parametrization and in μP."""

from __future__ import annotations

import math
from typing import Any

from scalelong.errors import InvalidValueError, invalid, unknown
from scalelong.runs.config import Config, override

PARAMETRIZATIONS = ("standard", "mup")


def width_of(config: Config) -> int:
    """Return `embed_dim` of a U-ViT, or the first channels of a U-Net."""
    return config.model.embed_dim if config.model.kind == "uvit" else _channels(config)[0]


def widened(config: Config, width: int, parametrization: str = "mup", base_width: int | None = None) -> Config:
    """Return `config` with a network of another width; the heads of a U-ViT keep theirs.

    Args:
        width: `embed_dim` of a U-ViT, or the first channels of a U-Net, whose other levels follow.
        parametrization: "mup", or "standard": the initial std shrinks as 1/√width, the learning rate stays.
        base_width: Width at which both are equal. Default: the config's own.
    """
    if parametrization not in PARAMETRIZATIONS:
        raise unknown("parametrization", parametrization, PARAMETRIZATIONS)
    own, mup = width_of(config), parametrization == "mup"
    base = base_width or config.mup.base_width or own
    settings: dict[str, Any] = {"mup.base_width": base} if mup else {"mup.base_width": None, "mup.base_depth": None}
    if config.model.kind == "uvit":
        head = own // config.model.num_heads
        if width < head or width % head:
            raise invalid("a width", f"a multiple of the head width {head}", width)
        # The config's init_std belongs to its base width in μP, and to its own width otherwise.
        std = config.model.init_std * math.sqrt((config.mup.base_width or own) / (base if mup else width))
        settings |= {"model.embed_dim": width, "model.num_heads": width // head, "model.init_std": std}
    else:
        if any(channels * width % own for channels in _channels(config)):
            raise invalid("a width", f"such that channels {_channels(config)} × width / {own} are integers", width)
        settings["model.channels"] = tuple(channels * width // own for channels in _channels(config))
    return override(config, settings)


def _channels(config: Config) -> tuple[int, ...]:
    from scalelong.models.unet import UNETS

    if config.model.kind != "unet":
        raise InvalidValueError(f"the width of model.kind={config.model.kind!r} is not known; use a U-ViT or a U-Net")
    channels = config.model.channels or UNETS.get(config.model.unet or "", {}).get("block_out_channels")
    if channels is None:
        raise invalid("model.channels", "one width per level", None)
    return tuple(channels)
