"""Scale the long skip connections of diffusion networks, and train, sample, evaluate and watch them.

Names are imported when they are first used, so that `import scalelong` costs nothing that is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy
from scalelong.version import __version__ as __version__

__getattr__, __all__ = lazy(
    __name__,
    {
        "scalelong.errors": ("MissingExtraError", "ScaleLongError", "ScalingWarning"),
        "scalelong.scaling": (
            "ConstantScaling",
            "ExplicitScaling",
            "LearnableScaling",
            "NoScaling",
            "ReZeroScaling",
            "StableScaling",
            "UniformScaling",
            "parse_scaling",
        ),
        "scalelong.skips": (
            "Site",
            "SkipShape",
            "apply",
            "describe",
            "load_scaling",
            "parameters",
            "register_adapter",
            "remove",
            "save_scaling",
            "scale_skip",
            "unscaled",
        ),
        "scalelong.evaluation": ("Evaluation", "evaluate_images"),
        "scalelong.models": ("UViT", "build_unet"),
        "scalelong.theory.stacked": ("StackedUNet",),
        "scalelong.kappa": ("KappaEstimate", "estimate_kappa"),
        "scalelong.monitor.monitor": ("Alarm", "Limits", "StabilityMonitor"),
        "scalelong.runs.run": ("load_run",),
    },
    rooms=("data",),
)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from scalelong.errors import MissingExtraError as MissingExtraError
    from scalelong.errors import ScaleLongError as ScaleLongError
    from scalelong.errors import ScalingWarning as ScalingWarning
    from scalelong.evaluation import Evaluation as Evaluation
    from scalelong.evaluation import evaluate_images as evaluate_images
    from scalelong.kappa import KappaEstimate as KappaEstimate
    from scalelong.kappa import estimate_kappa as estimate_kappa
    from scalelong.models import UViT as UViT
    from scalelong.models import build_unet as build_unet
    from scalelong.monitor.monitor import Alarm as Alarm
    from scalelong.monitor.monitor import Limits as Limits
    from scalelong.monitor.monitor import StabilityMonitor as StabilityMonitor
    from scalelong.runs.run import load_run as load_run
    from scalelong.scaling import ConstantScaling as ConstantScaling
    from scalelong.scaling import ExplicitScaling as ExplicitScaling
    from scalelong.scaling import LearnableScaling as LearnableScaling
    from scalelong.scaling import NoScaling as NoScaling
    from scalelong.scaling import ReZeroScaling as ReZeroScaling
    from scalelong.scaling import StableScaling as StableScaling
    from scalelong.scaling import UniformScaling as UniformScaling
    from scalelong.scaling import parse_scaling as parse_scaling
    from scalelong.skips import Site as Site
    from scalelong.skips import SkipShape as SkipShape
    from scalelong.skips import apply as apply
    from scalelong.skips import describe as describe
    from scalelong.skips import load_scaling as load_scaling
    from scalelong.skips import parameters as parameters
    from scalelong.skips import register_adapter as register_adapter
    from scalelong.skips import remove as remove
    from scalelong.skips import save_scaling as save_scaling
    from scalelong.skips import scale_skip as scale_skip
    from scalelong.skips import unscaled as unscaled
    from scalelong.theory.stacked import StackedUNet as StackedUNet
