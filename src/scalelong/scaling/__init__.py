"""What κ is: specs that describe a scaling (no torch needed) and the modules that execute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelong.lazy import lazy
from scalelong.scaling.specs import (
    BlockScaling,
    ConstantScaling,
    ExplicitScaling,
    FixedScaling,
    LearnableScaling,
    NoScaling,
    Notice,
    ReZeroScaling,
    Scaling,
    SkipShape,
    StableScaling,
    UniformScaling,
    kappa_notices,
    parse_scaling,
    scaling_names,
)

__getattr__, _modules = lazy(__name__, {"scalelong.scaling.modules": ("FixedSkips", "SkipScaling")})

__all__ = [
    "BlockScaling",
    "ConstantScaling",
    "ExplicitScaling",
    "FixedScaling",
    "FixedSkips",
    "LearnableScaling",
    "NoScaling",
    "Notice",
    "ReZeroScaling",
    "Scaling",
    "SkipScaling",
    "SkipShape",
    "StableScaling",
    "UniformScaling",
    "kappa_notices",
    "parse_scaling",
    "scaling_names",
]

if TYPE_CHECKING:
    from scalelong.scaling.modules import FixedSkips, SkipScaling
