"""Read the weights that U-ViT and ScaleLong published: everything but image size and heads is in their shapes."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.scaling import LearnableScaling, Scaling, parse_scaling

if TYPE_CHECKING:
    from scalelong.models.uvit import UViT


def load_official(
    cls: type[UViT],
    source: str | Path | dict[str, Tensor],
    *,
    img_size: int,
    num_heads: int,
    scaling: Scaling | str | dict[str, Any] | None,
) -> UViT:
    """See `UViT.from_official`."""
    state = _read(source)
    calibration = {k: state.pop(k) for k in [k for k in state if k.startswith("se.")]}
    config = _infer(state, img_size)
    spec = _scaling(scaling, calibration, depth=config["depth"], tokens=state["pos_embed"].shape[1])
    model = cls(**config, num_heads=num_heads, scaling=spec)
    n = len(model.in_blocks)
    state |= {_renamed(key, n): value for key, value in calibration.items()}
    expected = model.state_dict()
    if calibration or not isinstance(spec, LearnableScaling):
        missing = sorted(set(expected) - set(state))
    else:  # LS from the identity: its weights are new
        missing = sorted(k for k in set(expected) - set(state) if not k.startswith("skip_scaling."))
    extra = sorted(set(state) - set(expected))
    wrong = [k for k in sorted(set(expected) & set(state)) if expected[k].shape != state[k].shape]
    if missing or extra or wrong:
        shapes = [f"{k} {tuple(state[k].shape)} for {tuple(expected[k].shape)}" for k in wrong]
        parts = [("missing", missing), ("unexpected", extra), ("of another shape", shapes)]
        told = "; ".join(f"{what}: {', '.join(keys[:8])}" for what, keys in parts if keys)
        raise ScaleLongError(f"the weights do not make a U-ViT of these sizes: {told}")
    model.load_state_dict(state, strict=False)
    return model


def _read(source: str | Path | dict[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(source, Mapping):
        path = Path(source)
        if not path.is_file():
            raise ScaleLongError(f"{path} is not a file; weights are a .pth or .safetensors file, or a state dict")
        try:
            if path.suffix == ".safetensors":
                source = load_file(path)
            else:
                source = torch.load(path, map_location="cpu", weights_only=True)
        except (
            SafetensorError,
            pickle.UnpicklingError,
            RuntimeError,
            EOFError,
            zipfile.BadZipFile,
            ValueError,
        ) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ScaleLongError(f"{path} cannot be read as weights: {reason}") from error
    if not isinstance(source, Mapping) or not all(isinstance(v, Tensor) for v in source.values()):
        raise ScaleLongError("the weights are not a state dict (names to tensors)")
    # DataParallel saves with a prefix
    return {re.sub(r"^module\.", "", key): value for key, value in source.items()}


def _infer(state: dict[str, Tensor], img_size: int) -> dict[str, Any]:
    """The constructor's arguments from keys and shapes."""
    needed = ("patch_embed.proj.weight", "pos_embed", "mid_block.attn.qkv.weight", "mid_block.mlp.fc1.weight")
    absent = [key for key in needed if key not in state]
    if absent:
        raise ScaleLongError(f"the weights are not a U-ViT's: missing {', '.join(absent)}")
    projection = state["patch_embed.proj.weight"]
    if projection.ndim != 4 or state["pos_embed"].ndim != 3:
        raise ScaleLongError(
            f"the weights are not a U-ViT's: patch_embed.proj.weight has shape {tuple(projection.shape)} "
            f"and pos_embed {tuple(state['pos_embed'].shape)}"
        )
    width, channels, patch, _ = projection.shape
    indices = {side: {int(k.split(".")[1]) for k in state if k.startswith(f"{side}.")} for side in _SIDES}
    n = max((len(found) for found in indices.values()), default=0)
    for side, found in indices.items():
        if found != set(range(n)) or not n:
            raise ScaleLongError(f"the weights lack blocks: {side} has {sorted(found)} where 0 to {n - 1} are expected")
    if img_size % patch:
        raise ScaleLongError(f"img_size {img_size} is not divisible by the weights' patch size {patch}")
    patches = (img_size // patch) ** 2
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
    tokens, extras = state["pos_embed"].shape[1], 1
    if "label_emb.weight" in state:
        config["num_classes"] = state["label_emb.weight"].shape[0]
        extras = 2
    if "context_embed.weight" in state:
        config["clip_dim"] = state["context_embed.weight"].shape[1]
        config["num_clip_token"] = tokens - patches - 1
        if config["num_clip_token"] <= 0:
            raise ScaleLongError(
                f"pos_embed has {tokens} tokens; less {patches} patches of a {img_size}×{img_size} image and 1 for "
                f"time, {config['num_clip_token']} are left for text; is img_size right?"
            )
        extras = 1 + config["num_clip_token"]
    if tokens != extras + patches:
        raise ScaleLongError(
            f"pos_embed has {tokens} tokens, but {extras} + {patches} patches of a {img_size}×{img_size} image "
            f"make {extras + patches}; is img_size right?"
        )
    return config


def _scaling(asked: Any, calibration: dict[str, Tensor], *, depth: int, tokens: int) -> Scaling:
    """LS where `se.*` is there; a contradiction between the weights and what was asked is an error."""
    names = ", ".join(sorted(calibration)[:4])
    spec = None if asked is None else parse_scaling(asked)
    if not calibration:
        if isinstance(spec, LearnableScaling) and spec.init != "identity":
            raise ScaleLongError(
                "LearnableScaling was asked for, but the weights hold no calibration network: missing "
                + ", ".join(f"se.{key}" for key in _SE)
                + '; init="identity" starts one that changes nothing'
            )
        return parse_scaling(spec)
    if spec is not None and not isinstance(spec, LearnableScaling):
        raise ScaleLongError(f"the weights hold a calibration network ({names}), which {spec!r} has no use for")
    shared = "se.layer1.weight" in calibration
    first = "se.layer1.weight" if shared else "se.0.layer1.weight"
    expected = (
        {f"se.{rest}" for rest in _SE} if shared else {f"se.{k}.{rest}" for k in range(depth // 2) for rest in _SE}
    )
    if set(calibration) != expected:
        odd = sorted(set(calibration) ^ expected)
        raise ScaleLongError(
            f"the calibration network's keys are not those of {depth // 2} long skips: {', '.join(odd)}"
        )
    hidden, width = calibration[first].shape
    if width != tokens:
        raise ScaleLongError(f"{first} gates {width} tokens, but pos_embed has {tokens}")
    inferred = LearnableScaling(shared=shared, reduction=_reduction(hidden, width), gate="tokens")
    if spec is None:
        return inferred
    if (spec.calibration, spec.shared, max(1, width // spec.reduction)) != ("se", shared, hidden):
        raise ScaleLongError(f"{spec!r} does not fit the weights' calibration network ({names}), which is {inferred!r}")
    if spec.gate == "channels":
        raise ScaleLongError(f'gate="channels" does not fit the weights: {first} gates {width} tokens')
    if spec.init == "identity":
        raise ScaleLongError('init="identity" is for weights without a calibration network; these hold one: ' + names)
    return spec


def _reduction(hidden: int, width: int) -> int:
    """A reduction r with max(1, width // r) = hidden; the paper's 16 where it fits."""
    fitting = [r for r in (16, *range(1, width + 1)) if max(1, width // r) == hidden]
    if not fitting:
        raise ScaleLongError(f"a hidden width of {hidden} for {width} tokens is no reduction of them")
    return fitting[0]


def _renamed(key: str, n: int) -> str:
    """`se.layer1.weight` is ζ; `se.K.layer1.weight` is the K-th from the innermost, so i = N − K."""
    own = re.match(r"se\.(\d+)\.(.+)", key)
    if own:
        return f"skip_scaling.networks.each.{n - 1 - int(own[1])}.{own[2]}"
    return f"skip_scaling.networks.zeta.{key.removeprefix('se.')}"


_UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError)
_SIDES = ("in_blocks", "out_blocks")
_SE = ("layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias")
