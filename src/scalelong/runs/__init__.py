"""Run folders: their config, logs and trained network, for everything that writes or reads one."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
