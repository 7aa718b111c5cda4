"""Training as a pure function of (config, step): presets, the loop, EMA, checkpoints, run folders."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
