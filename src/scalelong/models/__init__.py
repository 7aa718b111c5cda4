"""The paper's networks: U-ViT, and diffusers' U-Nets in the paper's sizes."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
