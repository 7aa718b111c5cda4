"""Where κ acts: find the long skips of any network, scale them, describe, remove, save and load."""

from scalelong.skips.adapters import find_sites, register_adapter
from scalelong.skips.application import apply, parameters, remove, scaling_of, unscaled
from scalelong.skips.description import Description, Row, describe
from scalelong.skips.sites import Site
from scalelong.skips.storage import load_scaling, save_scaling

__all__ = [
    "Description",
    "Row",
    "Site",
    "apply",
    "describe",
    "find_sites",
    "load_scaling",
    "parameters",
    "register_adapter",
    "remove",
    "save_scaling",
    "scaling_of",
    "unscaled",
]
