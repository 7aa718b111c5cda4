"""The peak of live tensors, counted where they are made: the same on a busy machine as on an idle one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """The most bytes of distinct storages alive at once, of tensors made inside the context."""

    watches_memory_only = True  # so that our kernels run: their results are tensors like others

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.live -= size


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes that `run` holds at most beyond what was there before."""
    with PeakMemory() as memory:
        run()
    return memory.peak
