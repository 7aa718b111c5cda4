"""Training as a pure function of (config, step): presets, the loop, EMA, checkpoints, run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.runs.config": ("Config", "override"),
        "scalelong.training.loop": ("train",),
        "scalelong.training.presets": ("PRESETS", "preset"),
        "scalelong.runs.run": ("Run", "load_run"),
    },
)

if TYPE_CHECKING:
    from scalelong.runs.config import Config as Config
    from scalelong.runs.config import override as override
    from scalelong.runs.run import Run as Run
    from scalelong.runs.run import load_run as load_run
    from scalelong.training.loop import train as train
    from scalelong.training.presets import PRESETS as PRESETS
    from scalelong.training.presets import preset as preset
