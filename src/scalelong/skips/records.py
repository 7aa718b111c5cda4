"""Record the scaling in the config of a network that has one (diffusers), and warn when it is saved without it."""

import warnings
from typing import Any

from torch import nn

from scalelong.errors import ScalingWarning
from scalelong.scaling import NoScaling, SkipScaling

KEY = "scalelong"  # the arguments of `apply`: scalelong.apply(net, **net.config["scalelong"])


class SaveWarning:
    """Stands in for `save_pretrained` of a scaled network, which `from_pretrained` returns unscaled."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    @property
    def __wrapped__(self) -> Any:  # diffusers' pipelines read the signature
        save: Any = type(self.root).save_pretrained  # type: ignore[attr-defined]
        return save.__get__(self.root)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        text = f"{type(self.root).__name__} is saved while it is scaled, but from_pretrained returns it unscaled"
        learned = next(self.root.skip_scaling.parameters(), None) is not None  # type: ignore[union-attr]
        hint = "use `with scalelong.unscaled(net): net.save_pretrained(folder)` and scalelong.save_scaling(net, folder)"
        if not learned:
            hint = (
                f'call scalelong.apply(net, **net.config["{KEY}"]) after loading, or scalelong.fold(net) before saving'
            )
        warnings.warn(f"{text}; {hint}", ScalingWarning, stacklevel=2)
        return self.__wrapped__(*args, **kwargs)


def record_scaling(root: nn.Module, scaler: SkipScaling | None) -> None:
    """Write the scaling into the network's config, None for an unscaled network. diffusers saves the config."""
    config: Any = getattr(root, "config", None)
    register: Any = getattr(root, "register_to_config", None)
    if config is None or register is None:
        return
    if "scaling" in config:  # an argument of our U-ViT
        register(scaling=(NoScaling() if scaler is None else scaler.spec.built).to_dict())
    elif scaler is not None:
        register(**{KEY: {"scaling": scaler.spec.to_dict(), "placement": scaler.placement}})
        root.__dict__["save_pretrained"] = SaveWarning(root)
    else:
        root.__dict__.pop("save_pretrained", None)
        if KEY in config:
            root._internal_dict = type(config)({k: v for k, v in config.items() if k != KEY})  # it has no delete


def recorded_scaling(root: nn.Module) -> dict[str, Any] | None:
    """Return what `record_scaling` wrote into the config of a network that was loaded since."""
    config: Any = getattr(root, "config", None)
    recorded = config.get(KEY) if hasattr(config, "get") else None
    return recorded if isinstance(recorded, dict) else None
