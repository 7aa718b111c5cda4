"""Find where numbers stopped being finite, by running a step again and looking at every module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(net: nn.Module, run: Callable[[], Tensor]) -> str:
    """Run `run()` (a loss of `net`) once more and say which module's output, or whose gradient, is first not finite."""
    bad_weights = [name for name, parameter in net.named_parameters() if not parameter.isfinite().all()]
    if bad_weights:
        return f"the weights of {bad_weights[0]} are not finite"
    found: list[str] = []
    names = {module: name or type(net).__name__ for name, module in net.named_modules()}
    handles = [m.register_forward_hook(_Watch(names[m], found)) for m in net.modules() if not list(m.children())]
    compiled, net._compiled_call_impl = getattr(net, "_compiled_call_impl", None), None  # hooks act in eager mode
    try:
        net.zero_grad(set_to_none=True)
        loss = run()
        if found:
            return f"the first module whose output is not finite is {found[0]}"
        if not loss.isfinite():
            return "every module's output is finite, the loss of them is not: look at the data"
        loss.backward()
        bad = [name for name, p in net.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        # Backward goes from the output to the input: the last such parameter met it first.
        return (
            f"the output is finite, the gradient of {bad[-1]} is not" if bad else "a second run of the step was finite"
        )
    finally:
        net._compiled_call_impl = compiled
        net.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()


class _Watch:
    def __init__(self, name: str, found: list[str]) -> None:
        self.name, self.found = name, found

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                self.found.append(self.name)
                return
