"""Scale the long skip connections of diffusion networks, and train, sample, evaluate and monitor them.

Public names are imported on first use, so `import scalelong` is cheap. `__init__.pyi` lists them.
"""

from scalelong.lazy import attach
from scalelong.version import __version__ as __version__

__getattr__, __dir__, __all__ = attach(__name__, __file__)
