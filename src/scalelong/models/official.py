"""Load weights published by U-ViT and ScaleLong. Their shapes determine everything but image size and heads."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scalelong.errors import DataError, InvalidValueError, UnsupportedNetworkError, one_line
from scalelong.scaling import LearnableScaling, Scaling, parse_scaling
from scalelong.skips.storage import key_problems

if TYPE_CHECKING:
    from scalelong.models.uvit import UViT

_SE = ("layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias")


def load_official(cls: type[UViT], source: Any, img_size: int, num_heads: int, scaling: Any) -> UViT:
    """See `UViT.from_official`."""
    state = _read(source)
    calibration = {k: state.pop(k) for k in [k for k in state if k.startswith("se.")]}
    config = _infer_config(state, img_size)
    spec = _choose_scaling(scaling, calibration, n=config["depth"] // 2, tokens=state["pos_embed"].shape[1])
    model = cls(**config, num_heads=num_heads, scaling=spec)
    state |= {_our_key(key, len(model.in_blocks)): value for key, value in calibration.items()}
    expected = model.state_dict()
    if not calibration:  # LS from the identity: its weights are new
        expected = {key: value for key, value in expected.items() if not key.startswith("skip_scaling.")}
    if problems := key_problems(expected, state, limit=8):
        raise UnsupportedNetworkError(f"the weights do not fit a U-ViT of these sizes: {problems}")
    model.load_state_dict(state, strict=False)
    return model


def _read(source: Any) -> dict[str, Tensor]:
    if not isinstance(source, Mapping):
        path = Path(source)
        if not path.is_file():
            raise DataError(f"{path} is not a file; pass a .pth or .safetensors file, or a state dict")
        try:
            safe = path.suffix == ".safetensors"
            source = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile,
                ValueError) as error:  # fmt: skip
            raise DataError(f"cannot read {path} as weights: {one_line(error)[:200]}") from error
    if not isinstance(source, Mapping) or not all(isinstance(v, Tensor) for v in source.values()):
        raise DataError(f"expected a state dict (names to tensors), got {type(source).__name__} with other values")
    return {re.sub(r"^module\.", "", key): value for key, value in source.items()}  # DataParallel adds a prefix


def _infer_config(state: dict[str, Tensor], img_size: int) -> dict[str, Any]:
    """Infer the constructor's arguments from keys and shapes."""
    needed = ("patch_embed.proj.weight", "pos_embed", "mid_block.attn.qkv.weight", "mid_block.mlp.fc1.weight")
    if missing := [key for key in needed if key not in state]:
        raise UnsupportedNetworkError(f"these are not the weights of a U-ViT: missing {', '.join(missing)}")
    projection, pos_embed = state["patch_embed.proj.weight"], state["pos_embed"]
    if projection.ndim != 4 or pos_embed.ndim != 3:
        shapes = f"patch_embed.proj.weight {tuple(projection.shape)} and pos_embed {tuple(pos_embed.shape)}"
        raise UnsupportedNetworkError(f"these are not the weights of a U-ViT, with shapes {shapes}")
    width, channels, patch, _ = projection.shape
    sides = ("in_blocks", "out_blocks")
    blocks = {side: {int(key.split(".")[1]) for key in state if key.startswith(f"{side}.")} for side in sides}
    n = max(map(len, blocks.values()))
    for side, indices in blocks.items():
        if indices != set(range(n)) or not n:
            raise UnsupportedNetworkError(f"{side} has blocks {sorted(indices)}, expected 0 to {n - 1}")
    if img_size % patch:
        raise InvalidValueError(f"img_size must be divisible by the weights' patch size {patch}, got {img_size}")
    patches, tokens, extras = (img_size // patch) ** 2, pos_embed.shape[1], 1
    config: dict[str, Any] = {
        "img_size": img_size,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": 2 * n,
        "mlp_ratio": state["mid_block.mlp.fc1.weight"].shape[0] / width,
        "qkv_bias": "mid_block.attn.qkv.bias" in state,
        "mlp_time_embed": "time_embed.0.weight" in state,
        "conv": "final_layer.weight" in state,
    }
    if "label_emb.weight" in state:
        config["num_classes"] = state["label_emb.weight"].shape[0]
        extras = 2
    if "context_embed.weight" in state:
        text = tokens - patches - 1
        if text <= 0:
            left = f"pos_embed has {tokens} tokens, minus {patches} patches, minus 1 for time"
            raise InvalidValueError(f"img_size {img_size} leaves {text} text tokens: {left}")
        config |= {"clip_dim": state["context_embed.weight"].shape[1], "num_clip_token": text}
        extras = 1 + text
    if tokens != extras + patches:
        counts = f"pos_embed has {tokens} tokens, but {extras} + {patches} patches make {extras + patches}"
        raise InvalidValueError(f"img_size {img_size} does not fit: {counts}")
    return config


def _choose_scaling(requested: Any, calibration: dict[str, Tensor], *, n: int, tokens: int) -> Scaling:
    """Select LS if `se.*` is present, and check that a requested scaling agrees with the weights."""
    spec = None if requested is None else parse_scaling(requested)
    if not calibration:
        parts = getattr(spec, "scalings", (spec,))  # of a composition
        if any(isinstance(part, LearnableScaling) and part.init != "identity" for part in parts):
            lacking = ", ".join(f"se.{key}" for key in _SE)
            raise UnsupportedNetworkError(f'the weights lack {lacking} of LS; use init="identity" to start a new one')
        return parse_scaling(spec)
    shared = "se.layer1.weight" in calibration
    prefixes = ["se."] if shared else [f"se.{k}." for k in range(n)]
    if odd := sorted(set(calibration) ^ {prefix + key for prefix in prefixes for key in _SE}):
        raise UnsupportedNetworkError(f"the calibration network does not fit {n} long skips: {', '.join(odd)}")
    hidden, width = calibration[f"{prefixes[0]}layer1.weight"].shape
    reduction = next((r for r in (16, *range(1, width + 1)) if max(1, width // r) == hidden), None)
    if width != tokens or reduction is None:
        expected = f"pos_embed has {tokens} tokens and the hidden width must be tokens // reduction"
        raise UnsupportedNetworkError(f"{prefixes[0]}layer1.weight maps {width} tokens to {hidden}, but {expected}")
    inferred = LearnableScaling(shared=shared, reduction=reduction, gate="tokens", activation="relu")
    fits = spec is None or (
        isinstance(spec, LearnableScaling) and spec.gate != "channels" and spec.init != "identity"
        and spec.activation in (LearnableScaling().activation, "relu")
        and (spec.calibration, spec.shared, max(1, width // spec.reduction)) == ("se", shared, hidden)
    )  # fmt: skip
    if not fits:
        names = ", ".join(sorted(calibration)[:4])
        raise UnsupportedNetworkError(f"{spec!r} does not fit the calibration network ({names}), which is {inferred!r}")
    return replace(spec, activation="relu") if isinstance(spec, LearnableScaling) else inferred  # their SE has a ReLU


def _our_key(key: str, n: int) -> str:
    """Translate `se.layer1.weight` (ζ) and `se.K.layer1.weight` (the K-th from the innermost: i = n − K)."""
    if own := re.match(r"se\.(\d+)\.(.+)", key):
        return f"skip_scaling.networks.each.{n - 1 - int(own[1])}.{own[2]}"
    return f"skip_scaling.networks.zeta.{key.removeprefix('se.')}"
