"""Images, labels and captions: read from any source, checked, prepared once, and served in batches."""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
