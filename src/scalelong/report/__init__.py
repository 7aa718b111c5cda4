"""Report runs: one self-contained HTML page, and the figures of the commands."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
