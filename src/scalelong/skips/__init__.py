"""Where κ acts: find the long skips of any network, scale them, describe, remove, save and load."""

from scalelong.scaling import SkipShape
from scalelong.skips.application import apply, parameters, remove, set_coefficients, unscaled
from scalelong.skips.description import Description, Row, describe
from scalelong.skips.distillation import Distillation, distill
from scalelong.skips.finders import find_sites, register_adapter
from scalelong.skips.folding import fold
from scalelong.skips.found import FoundSkips, find_skips
from scalelong.skips.hooks import scale_skip, scaling_of
from scalelong.skips.sites import Join, Site
from scalelong.skips.storage import load_scaling, save_scaling

__all__ = [
    "Description", "Distillation", "FoundSkips", "Join", "Row", "Site", "SkipShape", "apply", "describe", "distill",
    "find_sites", "find_skips", "fold", "load_scaling", "parameters", "register_adapter", "remove", "save_scaling",
    "scale_skip", "scaling_of", "set_coefficients", "unscaled",
]  # fmt: skip
