"""The tensors of a TorchScript archive, without running anything that is in it.

`torch.jit.load` compiles and runs the archive's code. All we want is its numbers: the archive is a zip whose
`data.pkl` says which tensor lies in which member, and the unpickler here knows a few inert names and no others.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import ScaleLongError

_DTYPES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
}


class _Node:
    """A scripted module, of which only the attributes are read."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attributes = state


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}/data.pkl"))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Node
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name in ("build_intlist", "build_doublelist", "build_boollist"):
            return list
        raise ScaleLongError(f"the archive names {module}.{name}, which no archive of weights needs; it was not read")

    def persistent_load(self, saved: Any) -> np.ndarray:
        kind, dtype, key, _, count = saved
        if kind != "storage" or not str(key).isdigit():
            raise ScaleLongError(f"the archive refers to {kind!r} {key!r}, which is no tensor; it was not read")
        return np.frombuffer(self._archive.read(f"{self._root}/data/{key}"), dtype, count)


def _rebuild(storage: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.from_numpy(storage.copy()).as_strided(shape, stride, offset).contiguous()


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Every tensor of the scripted module in `path`, by its dotted name."""
    try:
        with zipfile.ZipFile(path) as archive:
            root = archive.namelist()[0].split("/")[0]
            module = _Reader(archive, root).load()
    except (zipfile.BadZipFile, KeyError, IndexError, pickle.UnpicklingError) as error:
        raise ScaleLongError(f"{path} is not a TorchScript archive ({error})") from None
    return dict(_tensors(module, ""))


def _tensors(node: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in node.attributes.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, _Node):
            yield from _tensors(value, f"{prefix}{name}.")
