"""Run a network to look at it, and leave no trace: not in its mode, its buffers, its gradients or random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from scalelong.errors import ScaleLongError


@contextmanager
def undisturbed(root: nn.Module, autocast: dict[str, torch.dtype | None]) -> Iterator[None]:
    """Eval mode, no gradients, random numbers of its own, eager execution; then everything as it was.

    `autocast`: the mixed precision in force, by kind of device. Its cache of cast weights is neither used nor left
    with copies that have no gradient.
    """
    modules = _parts(root)
    training = [module for module in modules if module.training]
    compiled = [module for module in modules if module.__dict__.get("_compiled_call_impl") is not None]
    kept = [(module, module._compiled_call_impl) for module in compiled]
    device = device_of(root)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(0)
        if compiled or hasattr(root.forward, "_torchdynamo_orig_callable"):
            stack.enter_context(_eager())
        for kind, dtype in autocast.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
        try:
            for module in training:
                module.__dict__["training"] = False  # nn.Module's own setter looks for parameters first
            for module in compiled:
                module._compiled_call_impl = None
            yield
        finally:
            for module in training:
                module.__dict__["training"] = True
            for module, implementation in kept:
                module._compiled_call_impl = implementation
            if any(torch.is_autocast_enabled(kind) for kind in {"cpu", device.type}):
                torch.clear_autocast_cache()  # a network that opens an autocast of its own has filled it


def is_compiled(net: nn.Module) -> bool:
    """Whether any part of a network runs through torch.compile, so that hooks would not be met."""
    return any(
        module.__dict__.get("_compiled_call_impl") is not None
        or "_torchdynamo_orig_callable" in getattr(module.__dict__.get("forward"), "__dict__", {})
        or type(module).__name__ == "OptimizedModule"
        for module in _parts(net)
    )


def _parts(root: nn.Module) -> list[nn.Module]:
    """Every module of a network once, in no order. `modules()` makes their names as well: ten times the time."""
    found, left = {root}, [root]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found.add(child)
                left.append(child)
    return list(found)


def device_of(net: nn.Module) -> torch.device:
    parameter = next(net.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def unwrapped(net: Any) -> nn.Module:
    """The network inside DDP, DataParallel, torch.compile or PEFT. Sharded networks are refused."""
    from scalelong.skips.application import _root

    for cls in type(net).__mro__:
        if cls.__name__ in ("FullyShardedDataParallel", "FSDPModule"):
            raise ScaleLongError(
                "a network sharded by FSDP cannot be watched: its parts are not whole on any process; watch it on one "
                "device or under DistributedDataParallel"
            )
    if not isinstance(net, nn.Module):
        raise ScaleLongError(f"a network (torch.nn.Module) is watched, not {type(net).__name__}")
    return _root(net, wrapped=True)


def _eager() -> Any:
    """Functions that are compiled inside the network run as they were written."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
    return torch.no_grad() if set_stance is None else set_stance("force_eager")
