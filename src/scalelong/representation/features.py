"""Pooled features of a network's blocks at noised images, computed once and cached on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong import counter
from scalelong._modules import device_of, eager, evaluating, first_tensor
from scalelong.counter import Stream
from scalelong.errors import InvalidValueError, UnknownNameError, suggestion
from scalelong.files import atomic_file, tensors_sha256
from scalelong.monitor.points import find_points
from scalelong.objective import Objective
from scalelong.progress import Tracker
from scalelong.representation.linear import standardized
from scalelong.skips.blocks import blocks_of, pooled
from scalelong.skips.hooks import NAME, module_at
from scalelong.skips.sites import ROOT

Call = Callable[[Tensor, Tensor], Any]  # (x_t, the network's time) → a pass
WORDS = ("train", "test")
Features = dict[str, tuple[Tensor, Tensor]]  # block → standardized features of the training and the test images


@dataclass(frozen=True)
class Labelled:
    """Images with classes. `read(indices)` returns float images (B, C, H, W); `key` names the data in the cache."""

    read: Callable[[Tensor], Tensor]
    labels: Tensor  # int64 (n,)
    key: str

    def __len__(self) -> int:
        return len(self.labels)


def choose_blocks(net: nn.Module, layers: str | Sequence[str]) -> tuple[list[str], bool]:
    """Return the paths of the blocks to probe, and whether the network's own list ("all") was taken."""
    found = blocks_of(net)
    if not found:
        found = [path for path in find_points(net).blocks if path not in (ROOT, NAME)] or [ROOT]
    if layers == "all":
        return found, True
    wanted = [layers] if isinstance(layers, str) else list(layers)
    modules = {ROOT, *(path for path, _ in net.named_modules() if path)}
    for path in wanted:
        if path not in modules:
            known = f"blocks: {', '.join(found)}; the path of any other module works too"
            raise UnknownNameError(f"unknown block {path!r}{suggestion(str(path), modules)} ({known})")
    if not wanted:
        raise InvalidValueError(f"layers must name at least one block or be 'all' ({', '.join(found)})")
    return list(dict.fromkeys(wanted)), False


@contextmanager
def recorded(net: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record the pooled output of each block, (B, C), at every pass within the block."""
    outputs: dict[str, Tensor] = {}
    extras = getattr(net, "extras", 0)  # tokens of a U-ViT before its patches
    handles = [module_at(net, path).register_forward_hook(partial(_keep, outputs, path, extras)) for path in paths]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: dict[str, Tensor], path: str, extras: int, module: nn.Module, args: Any, output: Any) -> None:
    if (x := first_tensor(output)) is not None and x.ndim > 1:
        outputs[path] = pooled(x, extras)


@dataclass
class Extractor:
    """Features of one network. `call` runs a pass, `paths` are its blocks; with `drop`, those without features go."""

    net: nn.Module
    call: Call
    paths: list[str]
    drop: bool
    objective: Objective
    seed: int
    batch_size: int
    cache: Path | None
    salt: str  # what else the features depend on: a hash of the conditions

    @torch.no_grad()
    def features(self, t: float, data: tuple[Labelled, Labelled], tracker: Tracker) -> Features:
        """Return standardized float16 features at time t, from the cache if they are there."""
        path = None if self.cache is None else self.cache / f"{self._key(t, data)}.safetensors"
        if path is not None and path.is_file():
            with suppress(SafetensorError, OSError):  # damaged: compute them again
                stored = load_file(path)
                for _ in range(self.batches(data)):
                    tracker.advance()
                self.paths = [p for p in self.paths if f"train/{p}" in stored]
                return {p: (stored[f"train/{p}"], stored[f"test/{p}"]) for p in self.paths}
        sets = [self._pooled(t, split, step, tracker) for step, split in enumerate(data)]
        found = {p: standardized(sets[0][p], sets[1][p]) for p in self.paths}
        if self.drop:  # what is the same for all images, such as a time embedding
            found = {p: pair for p, pair in found.items() if bool(pair[0].any())}
            if not found:
                raise InvalidValueError(f"the features of {', '.join(self.paths)} are the same for all images")
            self.paths = list(found)
        features = {p: (a.half().cpu(), b.half().cpu()) for p, (a, b) in found.items()}
        if path is not None:
            tensors = {f"{word}/{p}": x for p, pair in features.items() for word, x in zip(WORDS, pair, strict=True)}
            with atomic_file(path) as temporary:
                save_file(tensors, temporary)
        return features

    def batches(self, data: tuple[Labelled, Labelled]) -> int:
        return sum(-(-len(split) // self.batch_size) for split in data)

    def _pooled(self, t: float, data: Labelled, step: int, tracker: Tracker) -> dict[str, Tensor]:
        """Features of one split, (n, C) per block. Noise depends on (seed, split, image), not on t or the batch."""
        parts: dict[str, list[Tensor]] = {}
        device, dtype, process = device_of(self.net), dtype_of(self.net), self.objective.process
        with evaluating(self.net), eager(self.net), recorded(self.net, self.paths) as outputs:
            for start in range(0, len(data), self.batch_size):
                x_0 = data.read(torch.arange(start, min(start + self.batch_size, len(data))))
                eps = counter.normal(self.seed, Stream.FEATURE_NOISE, step, start, len(x_0), x_0.shape[1:])
                times = torch.full((len(x_0),), float(t))
                x_t = process.add_noise(x_0, eps, times).to(device)
                outputs.clear()
                x, time = self.objective.network_inputs(x_t, times)
                self.call(x.to(dtype), time)
                if not parts:
                    self._check(outputs, len(x_0))
                for path in self.paths:
                    parts.setdefault(path, []).append(outputs[path].float())
                tracker.advance()
        return {path: torch.cat(rows) for path, rows in parts.items()}

    def _check(self, outputs: dict[str, Tensor], n: int) -> None:
        """Every block has one row of features per image; of the network's own list, others are left out."""
        usable = [path for path in self.paths if path in outputs and len(outputs[path]) == n]
        if self.drop:
            self.paths = usable or self.paths
        if missing := [path for path in self.paths if path not in usable]:
            raise InvalidValueError(f"block {missing[0]!r} returns no features of each image: (B, C, …) or (B, L, D)")

    @cached_property
    def _identity(self) -> list[Any]:
        tensors = {**self.net.state_dict(), **dict(self.net.named_buffers())}  # buffers that are not stored too
        known = [tensors_sha256(tensors), str(self.net), _settings(self.net)]
        return [*known, list(self.paths), self.objective.to_dict()]

    def _key(self, t: float, data: tuple[Labelled, Labelled]) -> str:
        parts = [*self._identity, *((split.key, len(split)) for split in data), t, self.seed, self.salt]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def dtype_of(net: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, or float32."""
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def _settings(net: nn.Module) -> list[Any]:
    """What a pass depends on but neither weights nor `str(net)` tell: heads, placement and sites of a scaling, …"""
    return [
        [path, type(module).__module__, {k: v for k, v in vars(module).items() if k != "training" and _is_plain(v)}]
        for path, module in net.named_modules()
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str)) or (is_dataclass(value) and not isinstance(value, type))
