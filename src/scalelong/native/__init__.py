"""Kernels in C for what a small transformer does beside matrix products, and torch where they cannot be used.

They are compiled in a second at their first use on a CPU, kept in the cache folder, and checked against torch before
they run. Without a C compiler, or with `SCALELONG_KERNELS=0`, everything works as before, only slower.
"""

from __future__ import annotations

from scalelong.native.allocator import keep_memory
from scalelong.native.attention import attention
from scalelong.native.gelu import GELU
from scalelong.native.library import available
from scalelong.native.update import AdamW, average_, clip_, distances, norms

__all__ = ["GELU", "AdamW", "attention", "available", "average_", "clip_", "distances", "keep_memory", "norms"]
