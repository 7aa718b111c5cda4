"""The networks that training knows by name: `MODELS["uvit"]` says how to build, call, save and load one.

Train a network of your own without touching this package. Register it in every process that trains or loads the run:

    from scalelong.models.registry import MODELS, Model

    MODELS["mine"] = Model(build=lambda model, shapes: MyUNet(shapes.channels, **model.options))
    config = override(preset("digits"), {"model.kind": "mine", "model.options": {"width": 32}})
    scalelong.training.train(config, "runs/mine")

This module imports torch only when a network is built, so that configs can be checked without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import InvalidValueError, RunError, ScaleLongError, invalid, one_line, out_of_memory, unknown

if TYPE_CHECKING:
    from torch import nn

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Shapes:
    """The shapes a network must accept: images (or latents), label table, text tokens."""

    channels: int
    size: int
    label_rows: int | None = None  # includes the null label where conditions are dropped
    text_tokens: int | None = None
    text_width: int | None = None


def _denoiser(net: nn.Module) -> nn.Module:
    from scalelong.diffusion.network import Denoiser

    return Denoiser(net)


def save_network(net: nn.Module, folder: Path) -> None:
    """Write a diffusers folder with the scaling, or weights and class name for a plain `nn.Module`."""
    from safetensors.torch import save_file

    from scalelong.skips import save_scaling, unscaled

    if not hasattr(net, "save_pretrained"):
        state = net.state_dict().items()  # copied, because safetensors refuses tied weights, which share memory
        save_file({name: value.detach().to("cpu", copy=True).contiguous() for name, value in state}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps({"_class_name": type(net).__name__}) + "\n", encoding="utf-8")
    elif "scaling" in net.config:  # type: ignore[operator]  # U-ViT stores its scaling in its own config
        net.save_pretrained(folder)  # type: ignore[operator]
    else:
        with unscaled(net):
            net.save_pretrained(folder)  # type: ignore[operator]
        save_scaling(net, folder, allow_unscaled=True)


def load_network(folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """Load what `save_network` wrote. `build` makes the network as it was before training."""
    from safetensors.torch import load_file

    from scalelong._modules import aligned
    from scalelong.skips import load_scaling

    try:
        name = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["_class_name"]
        network, fresh = _class(name), None
        if network is None:
            fresh = build()
            network = type(fresh)
        if network.__name__ != name:
            raise RunError(f"{folder} contains a {name!r}, but this run's config builds a {network.__name__!r}")
        if hasattr(network, "from_pretrained"):
            net = network.from_pretrained(folder, use_safetensors=True)
            return net if "scaling" in net.config else load_scaling(aligned(net), folder)
        assert fresh is not None
        fresh.load_state_dict(load_file(folder / WEIGHTS))
        return fresh
    except ScaleLongError:
        raise
    except Exception as error:  # diffusers raises many types for a damaged config or damaged weights
        if out_of_memory(error):
            raise
        raise RunError(f"could not load the network in {folder}: {one_line(error)[:300]}") from error


def _class(name: Any) -> Any:
    """Return the class of a network of this package or of diffusers, None for any other name."""
    if name in ("UNet2DModel", "UNet2DConditionModel"):
        import diffusers

        return getattr(diffusers, name)
    if name != "UViT":
        return None
    from scalelong.models import UViT

    return UViT


@dataclass(frozen=True)
class Model:
    """How training handles one kind of network.

    build: `build(model, shapes)` returns the network without scaling, on the CPU; training applies the scaling.
        `model` is the config's model section, with your own settings in `model.options` (a JSON object).
    adapt: wraps the network so that it is called as `net(x, t, y=labels, context=tokens)`. The default handles
        that signature, arguments it lacks, and diffusers' U-Nets.
    save, load: `save(net, folder)` and `load(folder, build)`. The default uses `save_pretrained` where the network has
        it, and otherwise stores the state dict.
    settings: the names in the config's model section that `build` reads; setting another one is refused. None: any.
    """

    build: Callable[[Any, Shapes], nn.Module]
    adapt: Callable[[nn.Module], nn.Module] = _denoiser
    save: Callable[[nn.Module, Path], None] = save_network
    load: Callable[[Path, Callable[[], nn.Module]], nn.Module] = load_network
    settings: tuple[str, ...] | None = None


def get_model(kind: str) -> Model:
    """Return the entry of `MODELS`, or raise an error that says how to register one."""
    if kind not in MODELS:
        error = unknown("model.kind", kind, MODELS)
        hint = f"register a network of your own first: scalelong.models.registry.MODELS[{kind!r}] = Model(…)"
        raise type(error)(f"{error}; {hint}")
    return MODELS[kind]


_UVIT = (
    "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "mlp_time_embed", "conv", "init_std",
    "base_head_width",
)  # fmt: skip


def _uvit(model: Any, shapes: Shapes) -> nn.Module:
    from scalelong.models import UViT

    return UViT(
        img_size=shapes.size,
        in_chans=shapes.channels,
        num_classes=shapes.label_rows,
        clip_dim=shapes.text_width,
        num_clip_token=shapes.text_tokens,
        **{name: getattr(model, name) for name in _UVIT},
    )


def _unet(model: Any, shapes: Shapes) -> nn.Module:
    from scalelong.models.unet import UNETS, attention_blocks, build_unet, level_sizes, unet_settings

    text = shapes.text_width
    options: dict[str, Any] = {"in_channels": shapes.channels, "out_channels": shapes.channels}
    options["dropout"] = model.dropout
    if not text:
        options["num_class_embeds"] = shapes.label_rows
    if model.unet is None:
        blocks = model.layers or 2
        return build_unet(unet_settings(shapes.size, model.channels, blocks, model.attention, text), **options)
    if model.unet not in UNETS:
        raise unknown("model.unet", model.unet, UNETS)
    conditional = UNETS[model.unet]["class"] == "UNet2DConditionModel"
    if conditional != bool(text):
        needed = "needs text; set data.text" if conditional else "takes no text; set data.text=none"
        raise InvalidValueError(f"U-Net {model.unet!r} {needed}")
    levels = len(UNETS[model.unet]["block_out_channels"])
    sizes = level_sizes(shapes.size, levels)
    options["sample_size"] = shapes.size
    if conditional:
        options["cross_attention_dim"] = text
    if model.channels is not None:
        if len(model.channels) != levels:
            expected, hint = f"{levels} values for U-Net {model.unet!r}", "model.unet=none takes any number of levels"
            raise invalid("model.channels", expected, model.channels, hint)
        options |= {"block_out_channels": model.channels, "attention_head_dim": min(8, *model.channels)}
    if model.layers is not None:
        options["layers_per_block"] = model.layers
    if model.attention is not None:
        options |= attention_blocks(sizes, model.attention, conditional)
    return build_unet(model.unet, **options)


MODELS: dict[str, Model] = {
    "uvit": Model(build=_uvit, settings=_UVIT),
    "unet": Model(build=_unet, settings=("unet", "channels", "layers", "attention", "dropout")),
}
