"""Images, labels and captions: read from any source, checked, prepared once, and served in batches.

Examples:
    >>> digits = scalelong.data.load("digits", "train")
    >>> digits.images.shape, digits.labels[:3].tolist()
    ((1497, 8, 8, 1), [0, 1, 2])
"""

from scalelong.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
