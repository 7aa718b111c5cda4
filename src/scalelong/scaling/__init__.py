"""What κ is: specs that describe a scaling (no torch needed) and the modules that execute them."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
