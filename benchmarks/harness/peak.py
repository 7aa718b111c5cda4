"""The machine's limit for a U-ViT: its own matrix products, alone, on ready operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """Linear layer (M, K) → (M, N), and how often a network has it."""

    M: int
    K: int
    N: int
    count: int


def products(*, batch: int, tokens: int, width: int, depth: int) -> list[Product]:
    """The linear layers of the blocks, which are all but 1 % of the products at S/2."""
    M, D, blocks = batch * tokens, width, 2 * (depth // 2) + 1
    return [
        Product(M, D, 3 * D, blocks),  # qkv
        Product(M, D, D, blocks),  # proj
        Product(M, D, 4 * D, blocks),  # fc1
        Product(M, 4 * D, D, blocks),  # fc2
        Product(M, 2 * D, D, depth // 2),  # skip_linear
    ]


def flop(layers: list[Product], *, batch: int, tokens: int, width: int, depth: int) -> float:
    """FLOP of forward + backward: linear layers three times; attention 4·B·L²·D forward, twice that backward."""
    linear = sum(3 * 2.0 * p.M * p.K * p.N * p.count for p in layers)
    return linear + 12.0 * batch * tokens**2 * width * (2 * (depth // 2) + 1)


def alone(layers: list[Product], dtype: torch.dtype = torch.float32) -> tuple[Callable[[], None], float]:
    """A function that runs each distinct product once in its three forms, and the FLOP that are in it."""
    operands = [
        (
            torch.randn(p.M, p.K).to(dtype),
            torch.randn(p.N, p.K).to(dtype),
            torch.randn(p.M, p.N).to(dtype),
        )
        for p in layers
    ]

    def run() -> None:
        for x, w, g in operands:
            torch.mm(x, w.t())  # forward
            torch.mm(g, w)  # gradient of the input
            torch.mm(g.t(), x)  # gradient of the weight

    return run, sum(3 * 2.0 * p.M * p.K * p.N for p in layers)


def together(layers: list[Product]) -> Callable[[], None]:
    """All products of a step, each as often as the network has it."""
    parts = [(alone([layer])[0], layer.count) for layer in layers]

    def run() -> None:
        for part, times in parts:
            for _ in range(times):
                part()

    return run
