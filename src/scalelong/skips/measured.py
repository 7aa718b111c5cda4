"""Initial weights of a scaling that are measured on an example, and how much the network's output moves with them."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import first_tensor, leave_no_trace
from scalelong.interpolant import as_float64
from scalelong.scaling import SkipScaling
from scalelong.skips.found import as_call
from scalelong.skips.hooks import attach


class _Observer:
    """Shows a scaling the tensors of every join and leaves them as they are."""

    def __init__(self, scaler: Any) -> None:
        self.scaler, self.spec, self.two_sided, self.joins = scaler, scaler.spec, scaler.two_sided, scaler.joins

    def scale(self, skip: Tensor, i: int) -> Tensor:
        self.scaler.observe(skip, None, i)
        return skip

    def join(self, skip: Tensor, backbone: Tensor, i: int) -> tuple[Tensor, Tensor]:
        self.scaler.observe(skip, backbone, i)
        return skip, backbone


def register_measured(
    root: nn.Module, scaler: SkipScaling, example: Any, register: Callable[[nn.Module, SkipScaling], None]
) -> None:
    """Let the scaling observe one pass of the unscaled network, register it, and measure how far the output moves."""
    args, kwargs = as_call(root, example)
    handles = attach(root, list(scaler.sites), _Observer(scaler))
    try:
        with leave_no_trace(root):
            before = _output(root(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    register(root, scaler)
    with leave_no_trace(root):
        after = _output(root(*args, **kwargs))
    scaler.moved = float((after - before).norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny))
    logging.getLogger("scalelong").info("%s moves the output by %.3g of its norm", scaler.spec, scaler.moved)


def _output(returned: Any) -> Tensor:
    tensor = first_tensor(list(returned.values()) if hasattr(returned, "keys") else returned)
    assert tensor is not None
    return as_float64(tensor.detach())
