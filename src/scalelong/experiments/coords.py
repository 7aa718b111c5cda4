"""`scalelong coords`: the coordinate check of μP. Activations, and their change in a few steps, against width.

In a correct μP neither depends on the width: the slopes of their logarithms against log width are 0. In the standard
parametrization the changes grow, so that the best learning rate shrinks as a network gets wider.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from scalelong import mup
from scalelong.errors import InvalidValueError, invalid
from scalelong.experiments.frontier import parallel
from scalelong.experiments.statistics import Estimate, slope_interval
from scalelong.experiments.widths import widened
from scalelong.progress import track
from scalelong.runs.config import Config, override

LIMIT = 0.1  # largest |slope| that passes


@dataclass(frozen=True)
class Coordinates:
    """Slopes of one kind of layer against width, in one parametrization.

    size    of the output's RMS at initialization; None where it is zero
    change  of the RMS of its change after the steps, relative to the network at initialization
    curve   width → the change, geometric mean over seeds

    A kind of layer has one RMS: over the outputs of all its layers.
    """

    layer: str
    parametrization: str
    size: Estimate | None
    change: Estimate
    curve: dict[int, float]

    @property
    def verdict(self) -> str:
        """ "pass" if both slopes are within ±LIMIT, "fail" if an interval lies outside, else "unclear"."""
        verdicts = [_verdict(slope) for slope in (self.size, self.change) if slope is not None]
        return next(word for word in ("fail", "unclear", "pass") if word in verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"verdict": self.verdict}


def overall(rows: Sequence[Coordinates]) -> str:
    """The worst verdict of all layers."""
    return next(word for word in ("fail", "unclear", "pass") if word in [row.verdict for row in rows])


def _verdict(slope: Estimate) -> str:
    if abs(slope.mean) <= LIMIT:
        return "pass"
    low, high = (slope.mean, slope.mean) if slope.low is None or slope.high is None else (slope.low, slope.high)
    return "fail" if low > LIMIT or high < -LIMIT else "unclear"


def coordinate_check(
    config: Config,
    widths: Sequence[int],
    parametrizations: Sequence[str] = ("standard", "mup"),
    *,
    base_width: int | None = None,
    steps: int = 5,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
) -> list[Coordinates]:
    """Train the network of `config` for a few steps at every width, and fit how its activations depend on the width.

    Layers are those with weights that grow with the width; a layer's name stands for all with the same name up to
    numbers. The learning rate is the config's, without warm-up.
    """
    if len(set(widths)) < 2:
        raise invalid("widths", "two or more different integers", list(widths))
    if steps < 2:
        raise invalid("steps", "an integer >= 2 (a zero output layer passes no gradient in the first)", steps)
    short = override(config, {"train.warmup": 0, "train.schedule": "constant", "train.compile": False})
    tasks = list(product(parametrizations, widths, seeds))
    configs = [override(widened(short, width, p, base_width), {"seed": seed}) for p, width, seed in tasks]
    measured = track(parallel(partial(_measure, steps), configs, jobs), "training", len(tasks))
    points: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for (p, width, _), sizes in zip(tasks, measured, strict=True):
        for (layer, what), value in sizes.items():
            points[p, layer][what].append((width, value))
    return [_fit(layer, p, found) for (p, layer), found in points.items()]


def _fit(layer: str, parametrization: str, found: dict[str, list[tuple[int, float]]]) -> Coordinates:
    slopes = {}
    for what, pairs in found.items():
        if any(not math.isfinite(value) for _, value in pairs):
            raise InvalidValueError(f"{layer} is not finite after a few steps ({parametrization}); use a smaller lr")
        positive = all(value > 0 for _, value in pairs)
        slopes[what] = slope_interval([(math.log(w), math.log(v)) for w, v in pairs]) if positive else None
    change, by_width = slopes["change"], defaultdict(list)
    if change is None:
        raise InvalidValueError(f"{layer} does not change ({parametrization}); does it reach the output?")
    for width, value in found["change"]:
        by_width[width].append(math.log(value))
    curve = {width: math.exp(math.fsum(logs) / len(logs)) for width, logs in sorted(by_width.items())}
    return Coordinates(layer, parametrization, slopes["size"], change, curve)


def _measure(steps: int, config: Config) -> dict[tuple[str, str], float]:
    """Return RMS sizes at initialization and of the change after `steps` steps, by kind of layer."""
    from scalelong.training.examples import Examples
    from scalelong.training.trainer import Trainer

    trainer = Trainer(config, Examples(config, config.data.split))
    probe = trainer.examples.probe(64).to(trainer.accelerator.device)
    table = mup.roles(trainer.net)
    layers = [row.name.removesuffix(".weight") for row in table.rows if len(row.shape) > 1 and row.role != "finite"]
    modules = {name: trainer.net.get_submodule(name) for name in layers if name in dict(trainer.net.named_modules())}
    before = _outputs(trainer, probe, modules)
    for _ in range(steps):
        trainer.step()
    after = _outputs(trainer, probe, modules)
    sizes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, first in before.items():
        kind = re.sub(r"\.\d+", ".#", name)
        sizes[kind, "size"].append(first.square().mean().item())
        sizes[kind, "change"].append((after[name] - first).square().mean().item())
    return {key: math.sqrt(math.fsum(values) / len(values)) for key, values in sizes.items()}


@torch.no_grad()
def _outputs(trainer: Any, probe: Any, modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, name=name: found.__setitem__(name, output.float().clone()))
        for name, module in modules.items()
    ]
    try:
        trainer.losses(probe)
    finally:
        for hook in hooks:
            hook.remove()
    return found
