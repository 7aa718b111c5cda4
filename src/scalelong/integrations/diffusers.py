"""Save and resume scaled networks in accelerate's checkpoints, with the EMA, as diffusers' training scripts do.

unet = scalelong.apply(unet, LearnableScaling())        # before EMAModel, the optimizer and accelerator.prepare
ema = EMAModel(unet.parameters(), model_cls=UNet2DModel, model_config=unet.config)
register_hooks(accelerator, ema=ema)                    # in place of the script's own save and load hooks
...
accelerator.save_state(folder); accelerator.load_state(folder)
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from scalelong.errors import ScalingStateError, invalid
from scalelong.skips import load_scaling, save_scaling, scaling_of, unscaled


def register_hooks(accelerator: Any, *, ema: Any = None, names: Sequence[str] = ("unet",)) -> None:
    """Let `accelerator.save_state` and `load_state` write and read networks with their scaling.

    Args:
        accelerator: accelerate's `Accelerator`.
        ema: diffusers' `EMAModel` of the first network, saved as `<name>_ema`.
        names: One folder per prepared network, in the order of `accelerator.prepare`.
    """
    accelerator.register_save_state_pre_hook(partial(_save_hook, accelerator, ema, tuple(names)))
    accelerator.register_load_state_pre_hook(partial(_load_hook, accelerator, ema, tuple(names)))


def save_pretrained(net: Any, folder: Path | str) -> None:
    """Write a network as diffusers does, without LS's weights among its own, and the scaling beside it."""
    with unscaled(net):
        net.save_pretrained(folder)
    save_scaling(net, folder, allow_unscaled=True)


def from_pretrained(cls: Any, folder: Path | str, **options: Any) -> Any:
    """Load a network that `save_pretrained` of this module wrote, with its scaling."""
    return load_scaling(cls.from_pretrained(folder, **options), folder)


def save_ema(ema: Any, net: nn.Module, folder: Path | str) -> None:
    """Write the average as `EMAModel.save_pretrained` does, LS included. `net` is the network that it averages."""
    own = list(net.parameters())
    if [p.shape for p in own] != [p.shape for p in ema.shadow_params]:
        hint = "build EMAModel(net.parameters(), …) after scalelong.apply"
        raise ScalingStateError(f"the EMA has {len(ema.shadow_params)} parameters, the network {len(own)}; {hint}")
    averaged: Any = copy.deepcopy(net)
    ema.copy_to(averaged.parameters())
    averaged.register_to_config(**{key: value for key, value in ema.state_dict().items() if key != "shadow_params"})
    save_pretrained(averaged, folder)


def load_ema(cls: Any, folder: Path | str, foreach: bool = False) -> Any:
    """Return the `EMAModel` that `save_ema` wrote, LS included."""
    from diffusers.training_utils import EMAModel

    net = from_pretrained(cls, folder)
    ema = EMAModel(net.parameters(), model_cls=cls, model_config=net.config, foreach=foreach)
    ema.load_state_dict(dict(net.config))  # decay and steps
    return ema


def _save_hook(
    accelerator: Any, ema: Any, names: tuple[str, ...], models: list[Any], weights: list[Any], folder: str
) -> None:
    for k, (net, name) in enumerate(_pairs(accelerator, models, names)):
        if accelerator.is_main_process:
            save_pretrained(net, Path(folder) / name)
            if k == 0 and ema is not None:
                save_ema(ema, net, Path(folder) / f"{name}_ema")
    weights.clear()  # accelerate must not save them again


def _load_hook(accelerator: Any, ema: Any, names: tuple[str, ...], models: list[Any], folder: str) -> None:
    for k, (net, name) in enumerate(_pairs(accelerator, models, names)):
        saved = from_pretrained(type(net), Path(folder) / name)
        there, here = map(_scaling_in_words, (saved, net))
        if there != here:
            problem = f"the checkpoint's {name} is scaled with {there}, the network with {here}"
            raise ScalingStateError(f"{problem}; apply the same scaling before load_state")
        net.load_state_dict(saved.state_dict())
        if k == 0 and ema is not None:
            average = load_ema(type(net), Path(folder) / f"{name}_ema", foreach=ema.foreach)
            ema.load_state_dict(average.state_dict())
            ema.to(accelerator.device)
    models.clear()  # accelerate must not load them again


def _scaling_in_words(net: Any) -> str:
    scaler = scaling_of(net)
    return "nothing" if scaler is None else f"{scaler.spec.built} at placement {scaler.placement!r}"


def _pairs(accelerator: Any, models: list[Any], names: tuple[str, ...]) -> list[tuple[Any, str]]:
    if len(models) != len(names):
        raise invalid("names", f"one name for each of the {len(models)} prepared networks", names)
    return [(accelerator.unwrap_model(model), name) for model, name in zip(models, names, strict=True)]
