"""Training as a pure function of (config, step): presets, the loop, EMA, checkpoints, run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.training.config": ("Config", "override"),
        "scalelong.training.loop": ("train",),
        "scalelong.training.presets": ("PRESETS", "preset"),
        "scalelong.training.run": ("Run", "load_run"),
    },
)

if TYPE_CHECKING:
    from scalelong.training.config import Config as Config
    from scalelong.training.config import override as override
    from scalelong.training.loop import train as train
    from scalelong.training.presets import PRESETS as PRESETS
    from scalelong.training.presets import preset as preset
    from scalelong.training.run import Run as Run
    from scalelong.training.run import load_run as load_run
