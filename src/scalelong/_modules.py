"""Run a network without changing it: eval mode for a block, and passes that leave no trace."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Net = TypeVar("Net", bound=nn.Module)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of `module.forward` by name; any, where it is scripted and does not tell."""
    try:
        return dict(inspect.signature(module.forward).parameters)
    except ValueError:
        anything = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return {name: inspect.Parameter(name, kind) for name, kind in anything.items()}


@contextmanager
def evaluating(net: Any, batch_statistics: bool = False) -> Iterator[None]:
    """Put every module of `net` in eval mode, and restore each module's own mode on exit.

    `net` may be any callable; a callable that is not a module is left alone. With `batch_statistics`, a BatchNorm in
    training mode normalizes by the batch as in training, and its averages stay what they are.
    """
    training = [module for module in modules_of(net) if module.training] if isinstance(net, nn.Module) else []
    norms = [m for m in training if batch_statistics and isinstance(m, nn.modules.batchnorm._BatchNorm)]
    training = [module for module in training if module not in norms]
    tracking = [norm for norm in norms if norm.track_running_stats]
    try:
        for module in training:
            module.__dict__["training"] = False  # nn.Module's setter is slow: it searches the parameters first
        for norm in tracking:
            norm.track_running_stats = False
        yield
    finally:
        for module in training:
            module.__dict__["training"] = True
        for norm in tracking:
            norm.track_running_stats = True


@contextmanager
def leave_no_trace(
    net: nn.Module, autocast: Mapping[str, torch.dtype | None] | None = None, batch_statistics: bool = False
) -> Iterator[None]:
    """Run `net` in eval mode, without gradients, eagerly and with fixed random numbers, and restore all state on exit.

    autocast           the mixed precision to use, by device type. Its cache of cast weights is neither read nor left
                       with copies that have no gradient.
    batch_statistics   see `evaluating`.
    """
    compiled = [(m, m._compiled_call_impl) for m in modules_of(net) if m.__dict__.get("_compiled_call_impl")]
    device = device_of(net)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(0)
        if compiled or hasattr(net.forward, "_torchdynamo_orig_callable"):
            stack.enter_context(eager(net))
        for kind, dtype in (autocast or {}).items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
        stack.enter_context(evaluating(net, batch_statistics))
        try:
            for module, _ in compiled:
                module._compiled_call_impl = None
            yield
        finally:
            for module, implementation in compiled:
                module._compiled_call_impl = implementation
            if any(torch.is_autocast_enabled(kind) for kind in {"cpu", device.type}):
                torch.clear_autocast_cache()  # a network that enters autocast itself has filled it


def is_compiled(net: nn.Module) -> bool:
    """Whether torch.compile wraps any part of `net`. Hooks do not run inside compiled code."""
    return any(
        module.__dict__.get("_compiled_call_impl") is not None
        or "_torchdynamo_orig_callable" in getattr(module.__dict__.get("forward"), "__dict__", {})
        or type(module).__name__ == "OptimizedModule"
        for module in modules_of(net)
    )


@contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """Let matrix products that stay in float32 use TF32 on a CUDA GPU, as convolutions do by default."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.set_float32_matmul_precision(before)


def modules_of(net: nn.Module) -> list[nn.Module]:
    """Return every module once, in no order. `net.modules()` also builds their names, which takes ten times longer."""
    found, stack = {net}, [net]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and child not in found:
                found.add(child)
                stack.append(child)
    return list(found)


def device_of(net: Any) -> torch.device:
    """Return the device of the first parameter, or the CPU."""
    parameter = next(net.parameters(), None) if isinstance(net, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a tensor, tuple, list or dictionary, searched recursively."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)


def eager(net: nn.Module) -> AbstractContextManager[Any]:
    """Run a network that torch.compile wraps, or parts of it, eagerly."""
    return torch.compiler.set_stance("force_eager") if is_compiled(net) else nullcontext()


def aligned(net: Net) -> Net:
    """Copy weights that are mapped from a file: they may be unaligned, which is slower and rounds differently."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    return net
