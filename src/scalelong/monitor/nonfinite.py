"""Find the first module whose output or gradient is not finite, by running a step again."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def first_nonfinite(net: nn.Module, run: Callable[[], Tensor]) -> str:
    """Run `run()`, which returns a loss of `net`, once more and report where it first stops being finite."""
    bad_weights = [name for name, parameter in net.named_parameters() if not parameter.isfinite().all()]
    if bad_weights:
        return f"the weights of {bad_weights[0]} are not finite"
    bad: list[str] = []

    def check(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        if not all(bool(x.isfinite().all()) for x in tensors):
            bad.append(name)

    leaves = [(name or type(net).__name__, m) for name, m in net.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(partial(check, name)) for name, module in leaves]
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
