"""Keep freed memory instead of giving it back: a training step frees and asks for the same tensors again and again."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


@lru_cache(maxsize=1)
def keep_memory() -> bool:
    """Tell glibc to serve large tensors from its heap and never to shrink it; False where that is not to be had.

    By default a tensor of some megabytes is mapped afresh, and the kernel clears its pages each time: a tenth of a
    step of `cifar10-tiny`. The process then keeps what it needed at most. A setting of the user's own wins.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if not sys.platform.startswith("linux") or set_by_user or os.environ.get("LD_PRELOAD"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
