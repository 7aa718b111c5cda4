"""Training as a pure function of (config, step): presets, the loop, EMA, checkpoints, run folders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "scalelong.training.config": ("Config", "override"),
    "scalelong.training.loop": ("train",),
    "scalelong.training.presets": ("PRESETS", "preset"),
    "scalelong.training.run": ("Run", "load_run"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'scalelong.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from scalelong.training.config import Config as Config
    from scalelong.training.config import override as override
    from scalelong.training.loop import train as train
    from scalelong.training.presets import PRESETS as PRESETS
    from scalelong.training.presets import preset as preset
    from scalelong.training.run import Run as Run
    from scalelong.training.run import load_run as load_run
