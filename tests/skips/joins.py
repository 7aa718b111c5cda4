"""Count a network's long skips without scalelong: watch which old tensors are joined behind the middle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class JoinWatch(TorchFunctionMode):
    """Notes every join of a run: a concatenation at the channels' axis (or a sum, in Eq. 3), behind the middle module,
    of a tensor that was made before the middle had run.

    made     every tensor made before the middle had run, in order
    joined   the numbers (in `made`) of the old tensors that were joined, in the order of the forward pass
    disturb  the number of an old tensor that everything behind the middle shall see with noise on it
    """

    def __init__(self, net: nn.Module, middle: str, axis: int, disturb: int | None = None) -> None:
        super().__init__()
        self.axis, self.disturb = axis, disturb
        self.made: list[Tensor] = []
        self.joined: list[int] = []
        self._number: dict[int, int] = {}  # by id; `made` keeps the tensors, so that no id is given twice
        self._behind = False
        self._handle = net.get_submodule(middle).register_forward_hook(self._pass_middle)

    def _pass_middle(self, module: nn.Module, args: Any, output: Any) -> None:
        self._behind = True
        for tensor in tree_leaves(output):
            self._number.pop(id(tensor), None)  # the middle's own output is the backbone

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._behind:
            old = [n for tensor in self._joins(func, args, kwargs) if (n := self._number.get(id(tensor))) is not None]
            if len(old) == 1:
                self.joined += old
            if self.disturb is not None:
                args, kwargs = tree_map(self._disturbed, (tuple(args), kwargs))
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._number.setdefault(id(tensor), len(self.made))
                self.made.append(tensor)
        return output

    def _joins(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        if func is torch.cat:
            tensors, dim = list(args[0]), kwargs.get("dim", args[1] if len(args) > 1 else 0)
            at_channels = tensors[0].ndim > 2 and dim % tensors[0].ndim == self.axis % tensors[0].ndim
            return tensors if len(tensors) == 2 and at_channels else []
        return list(args) if func in (Tensor.add, Tensor.__add__) and args[0].ndim == 2 else []

    def _disturbed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self._number.get(id(value)) != self.disturb:
            return value
        return value + 1.0 + value.roll(1, -1)
