"""Find the first module whose output or gradient is not finite, by running a step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(net: nn.Module, run: Callable[[], Tensor]) -> str:
    """Run `run()`, which returns a loss of `net`, once more and report where it first stops being finite."""
    bad_weights = [name for name, parameter in net.named_parameters() if not parameter.isfinite().all()]
    if bad_weights:
        return f"the weights of {bad_weights[0]} are not finite"
    bad: list[str] = []
    leaves = [(name or type(net).__name__, m) for name, m in net.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(_Check(name, bad)) for name, module in leaves]
    compiled, net._compiled_call_impl = getattr(net, "_compiled_call_impl", None), None  # hooks need eager mode
    try:
        net.zero_grad(set_to_none=True)
        loss = run()
        if bad:
            return f"the first module whose output is not finite is {bad[0]}"
        if not loss.isfinite():
            return "every module's output is finite but the loss is not: check the data"
        loss.backward()
        gradients = [name for name, p in net.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        if not gradients:
            return "the step was finite when it was run again"
        # Backward runs from output to input, so the last of these parameters was the first to overflow.
        return f"the output is finite but the gradient of {gradients[-1]} is not"
    finally:
        net._compiled_call_impl = compiled
        net.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()


class _Check:
    def __init__(self, name: str, bad: list[str]) -> None:
        self.name, self.bad = name, bad

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                self.bad.append(self.name)
                return
