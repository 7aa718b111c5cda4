"""Experiments: train variants under equal conditions, compare them over seeds, and measure their robustness."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
