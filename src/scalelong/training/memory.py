"""GPU memory of a training step, estimated without a GPU, and the settings with which a run fits.

The activations are those that torch allocates: the step runs on tensors without data (`FakeTensorMode`) and the bytes
alive at once are counted. docs/scale.md states what the estimate assumes.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalelong.errors import InvalidValueError, invalid
from scalelong.models.registry import Shapes, get_model
from scalelong.runs.config import Config, override
from scalelong.runs.run import build_network
from scalelong.training.presets import expected_shapes, sizes

GIB = 2**30
STATE = 20  # bytes per parameter: weight, gradient, two moments of AdamW, average; all float32
USABLE, CONTEXT = 0.9, GIB  # of a GPU: the rest is lost to fragmentation, and CUDA with its libraries takes a GiB
EFFICIENT = 32  # images at once; with fewer, recomputing activations costs less than the idle GPU
MEASURED = (32, 64)  # images: large enough that a pass holds more than the gradients it makes


class PeakMemory(TorchDispatchMode):
    """Count the bytes of distinct storages created inside the context; `peak` is the most alive at once."""

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


class _NormsInFloat32(TorchFunctionMode):
    """Autocast as on CUDA, which computes norms in float32. On CPUs it keeps the type of their input."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.layer_norm, torch.group_norm):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


def activation_bytes(
    config: Config, images: int, shapes: Shapes | None = None, precision: str = "bf16", real: bool = False
) -> int:
    """Return the peak bytes that forward and backward of `images` allocate beside weights and gradients.

    With `real`, the network computes; otherwise its tensors have no data, and any size runs anywhere.
    """
    shapes = shapes or expected_shapes(config)
    with nullcontext() if real else torch.device("meta"):
        net = build_network(config, shapes).train()
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        net = net if real else net.to_empty(device="cpu")
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x, t = torch.zeros(images, shapes.channels, shapes.size, shapes.size), torch.zeros(images)
        y = torch.zeros(images, dtype=torch.long) if shapes.label_rows else None
        context = torch.zeros(images, shapes.text_tokens or 0, shapes.text_width) if shapes.text_width else None
        mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with PeakMemory() as memory:
            with mixed, _NormsInFloat32() if precision == "bf16" else nullcontext():
                output = get_model(config.model.kind).adapt(net)(x, t, y=y, context=context)
            (output.float() - x).square().mean().backward()
    return memory.peak


def measure(config: Config) -> dict[str, list[int]]:
    """Return bytes as [fixed, per image], of plain and of checkpointed passes in bf16."""
    few, many = MEASURED
    found = {}
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        changed = override(config, {"train.gradient_checkpointing": checkpointing})
        low, high = (activation_bytes(changed, images) for images in (few, many))
        slope = (high - low) // (many - few)
        found[name] = [low - few * slope, slope]
    return found


def step_bytes(size: dict[str, Any], images: int, checkpointing: bool = False) -> float:
    """Return the bytes that a GPU needs for `images` at once, of a network with this entry of `sizes()`."""
    fixed, per_image = size["activations"]["checkpointed" if checkpointing else "plain"]
    return STATE * size["parameters"] + fixed + per_image * images


def fit(config: Config, gpus: int, gib: float) -> dict[str, Any]:
    """Return the settings with which a run of a preset's network fits on `gpus` GPUs of `gib` GiB, none if as it is.

    It takes the fewest parts of at least EFFICIENT images; if these do not fit, activations are recomputed.
    """
    size, batch = sizes().get(config.preset, {}), config.train.batch_size
    if "activations" not in size:
        return {}
    if gpus < 1 or batch % gpus:
        raise invalid("--gpus", f"a divisor of train.batch_size={batch}", gpus)
    room = USABLE * gib * GIB - CONTEXT
    parts = [count for count in range(1, batch // gpus + 1) if batch // gpus % count == 0]
    large = [count for count in parts if batch // gpus // count >= min(EFFICIENT, batch // gpus)]
    for checkpointing, counts in ((False, large), (True, parts)):
        for count in counts:
            if step_bytes(size, batch // gpus // count, checkpointing) <= room:
                parts_of = {"train.accumulate": count} if count > 1 else {}
                return parts_of | ({"train.gradient_checkpointing": True} if checkpointing else {})
    needed = step_bytes(size, 1, True) / GIB
    raise InvalidValueError(f"{config.preset} needs about {needed:.0f} GiB for one image, got GPUs of {gib:g} GiB")
