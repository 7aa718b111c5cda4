"""Emulated low precision: a U-ViT whose residual stream is rounded to bf16 or fp16 after every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scalelong.errors import unknown
from scalelong.models.registry import MODELS

if TYPE_CHECKING:
    from torch import nn

ROUNDED = "uvit-rounded"  # its name in MODELS
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def register_rounded() -> None:
    """Register the U-ViT whose residual stream is rounded after every block."""
    if ROUNDED not in MODELS:
        uvit = MODELS["uvit"]
        MODELS[ROUNDED] = replace(
            uvit, build=partial(_rounded, uvit.build), settings=(*(uvit.settings or ()), "options")
        )


def _rounded(build: Callable[[Any, Any], nn.Module], model: Any, shapes: Any) -> nn.Module:
    net: Any = build(model, shapes)
    for block in (*net.in_blocks, net.mid_block, *net.out_blocks):
        block.register_forward_hook(Rounding(model.options["rounding"]))
    return net


class Rounding:
    """A forward hook that rounds a block's output, and its gradient, to what bf16 or fp16 can represent.

    The arithmetic stays fp32. "fp32" rounds nothing. `largest` is the largest absolute value so far.
    """

    def __init__(self, kind: str) -> None:
        if kind not in PRECISIONS:
            raise unknown("rounding", kind, PRECISIONS)
        self.kind, self.largest = kind, 0.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        import torch

        self.largest = max(self.largest, output.detach().abs().max().item())
        return output.to(getattr(torch, PRECISIONS[self.kind])).to(output.dtype)
