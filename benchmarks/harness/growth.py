"""How costs grow: a U-ViT's forward + backward against depth, width, tokens and batch; skips alone; processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scalelong.bench.contestants import backward
from scalelong.bench.processes import seconds_of
from scalelong.bench.timing import Spread, interleave
from torch import Tensor, nn

BASE: dict[str, Any] = {"img_size": 16, "patch_size": 2, "embed_dim": 128, "depth": 8, "num_heads": 4}
BATCH = 8
AXES: dict[str, tuple[int, ...]] = {
    "depth": (2, 4, 8, 16),
    "width": (64, 128, 256, 384),
    "tokens": (17, 65, 145, 257),
    "batch": (2, 4, 8, 16),
}
SKIPS = {1: 15, 2: 9, 4: 5, 7: 3, 22: 1}  # N to matrices a block: (2N + 1)·l = 45 matrices, whatever N


@dataclass(frozen=True)
class Growth:
    """Time against one size, as ratios to the smallest; `slope` is that of log time over log size."""

    axis: str
    sizes: tuple[int, ...]
    ratios: tuple[Spread, ...]
    slope: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_growth(rounds: int) -> list[Growth]:
    """One network a size; all sizes of an axis take turns."""
    from scalelong.models import UViT

    found = []
    for axis, sizes in AXES.items():
        cases = {}
        for size in sizes:
            shape, batch = dict(BASE), BATCH
            if axis == "batch":
                batch = size
            elif axis == "tokens":
                shape["img_size"] = 2 * math.isqrt(size - 1)
            else:
                shape[{"width": "embed_dim"}.get(axis, axis)] = size
            x = torch.randn(batch, 3, shape["img_size"], shape["img_size"])
            cases[str(size)] = backward(UViT(**shape), x, torch.rand(batch) * 999)
        times = interleave(cases, rounds, 1)
        ratios = tuple(times.share(str(size), str(sizes[0])) for size in sizes)
        found.append(Growth(axis, sizes, ratios, slope(sizes, [r.median for r in ratios])))
    return [*found, _skips(rounds), _processes(max(2, rounds // 2))]


def _processes(rounds: int) -> Growth:
    """Steps of `digits` by the clock, on more and more processes of one thread: −1 is all that can be had."""
    cores = max(2, os.cpu_count() or 1)
    sizes = tuple(2**k for k in range(min(cores.bit_length(), 5)))  # powers of two up to the cores, at most 16
    taken = [[seconds_of(world, threads=1)[0] for world in sizes] for _ in range(rounds)]
    ratios = tuple(Spread.of([row[k] / row[0] for row in taken]) for k in range(len(sizes)))
    return Growth("processes", sizes, ratios, slope(sizes, [r.median for r in ratios]))


def _skips(rounds: int) -> Growth:
    """The network of Eq. 3 with more and more scaled skips over the same 45 matrices: what skips cost by themselves."""
    from scalelong.models import StackedUNet
    from scalelong.scaling import ConstantScaling

    x, cases = torch.randn(64, 256), {}
    for skips, matrices in SKIPS.items():
        net = StackedUNet(256, skips, matrices, scaling=ConstantScaling(0.9), init="norm-preserving")
        cases[str(skips)] = _pass(net, x)
    times, sizes = interleave(cases, 4 * rounds, 2), tuple(SKIPS)
    ratios = tuple(times.share(str(size), "1") for size in sizes)
    return Growth("skips", sizes, ratios, slope(sizes, [r.median for r in ratios]))


def _pass(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad(set_to_none=True)
        net(x).square().mean().backward()

    return run


def slope(sizes: tuple[int, ...], values: list[float]) -> float:
    """Least squares of log value over log size."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def save_growth(growth: list[Growth], path: Path) -> None:
    """One panel an axis, both axes logarithmic, quartiles as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(growth), figsize=(3.2 * len(growth), 3.0), layout="constrained")
    for panel, g in zip(panels, growth, strict=True):
        middle = [r.median for r in g.ratios]
        bars = [[r.median - r.low for r in g.ratios], [r.high - r.median for r in g.ratios]]
        panel.errorbar(g.sizes, middle, yerr=bars, marker="o", capsize=3)
        panel.set(xscale="log", yscale="log", xlabel=g.axis, title=f"slope {g.slope:.2f}")
        panel.set_xticks(g.sizes, [str(size) for size in g.sizes])
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    panels[0].set_ylabel("time / smallest")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
