"""`scalelong transfer`: does the best learning rate, or the best κ, stay where it is as a network gets wider or deeper?

Short runs on a grid of parametrization × width × depth × scaling × learning rate × seed, each judged by the validation
loss of its EMA weights on fixed images, times and noise. Finished trials are appended to a file; a second call resumes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scalelong.errors import invalid
from scalelong.experiments.frontier import parallel
from scalelong.experiments.statistics import Estimate, mean_interval
from scalelong.experiments.trials import TrialFile
from scalelong.experiments.widths import widened
from scalelong.progress import track
from scalelong.runs.config import Config, override
from scalelong.scaling import Scaling


@dataclass(frozen=True)
class Cell:
    """One network and how it is parametrized; it is trained at every learning rate and seed."""

    parametrization: str
    width: int
    depth: int | None
    scaling: Scaling

    @property
    def label(self) -> str:
        return f"{self.parametrization}, width {self.width}" + (f", depth {self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Curve:
    """Loss against learning rate. A diverged run has the loss None.

    optimum  the learning rate of the lowest loss: a parabola through the best point and its neighbours in log lr,
             geometric mean over seeds with its t interval
    inside   whether the optimum of every seed lies inside the grid; otherwise it is a bound
    best     loss at the best learning rate of each seed, mean over seeds

    `optimum` and `best` are NaN, and null in JSON, if a seed diverged at every learning rate.
    """

    cell: Cell
    losses: dict[float, tuple[float | None, ...]]
    optimum: Estimate
    inside: bool
    best: Estimate

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged at every learning rate."""
        return math.isnan(self.best.mean)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        cell = {**vars(self.cell), "scaling": self.cell.scaling.to_dict(), "label": self.cell.scaling.label}
        rates = {"lr": list(self.losses), "loss": [list(values) for values in self.losses.values()]}
        optimum, best = (None if self.diverged else asdict(one) for one in (self.optimum, self.best))
        return cell | rates | {"optimum": optimum, "inside": self.inside, "best": best}


def measure_transfer(
    config: Config,
    *,
    widths: Sequence[int],
    rates: Sequence[float],
    out: Path,
    depths: Sequence[int] | None = None,
    scalings: Sequence[Scaling] | None = None,
    parametrizations: Sequence[str] = ("standard", "mup"),
    base_width: int | None = None,
    base_depth: int | None = None,
    seeds: Sequence[int] = (0, 1),
    jobs: int = 1,
) -> list[Curve]:
    """Train every cell of the grid and return one curve per cell.

    `base_width` and `base_depth` are those of μP; by default the config's.
    """
    if not rates or not all(rate > 0 for rate in rates):
        raise invalid("learning rates", "one or more numbers > 0", list(rates))
    chosen: Sequence[int | None] = depths or [None]
    cells = [Cell(*c) for c in product(parametrizations, widths, chosen, scalings or [config.scaling])]
    make = partial(_config, config, base_width, base_depth)
    for cell in cells:
        make(cell, rates[0], seeds[0])  # refuse an impossible width or scaling before the first run
    tasks = [make(cell, rate, seed) for seed in seeds for cell in cells for rate in rates]
    run = partial(_run, TrialFile(out / "trials.jsonl"))
    results = track(parallel(run, tasks, jobs), "training", len(tasks))
    keys = [(cell, rate, seed) for seed in seeds for cell in cells for rate in rates]
    found = dict(zip(keys, results, strict=True))
    return [_curve(cell, {r: tuple(found[cell, r, s] for s in seeds) for r in sorted(rates)}) for cell in cells]


def _config(config: Config, base_width: int | None, base_depth: int | None, cell: Cell, lr: float, seed: int) -> Config:
    changed = widened(config, cell.width, cell.parametrization, base_width)
    settings: dict[str, Any] = {"train.lr": lr, "seed": seed, "monitor.every": 0, "scaling": cell.scaling}
    if cell.depth is not None:
        settings["model.depth"] = cell.depth
    if base_depth is not None and cell.parametrization == "mup":
        settings["mup.base_depth"] = base_depth
    return override(changed, settings)


def _curve(cell: Cell, losses: dict[float, tuple[float | None, ...]]) -> Curve:
    seeds = [{lr: values[s] for lr, values in losses.items()} for s in range(len(next(iter(losses.values()))))]
    if any(set(seed.values()) == {None} for seed in seeds):  # the other cells are of use all the same
        unknown = Estimate(math.nan, None, None, len(seeds))
        return Curve(cell, losses, unknown, False, unknown)
    each = [optimum(seed) for seed in seeds]
    logs = mean_interval([math.log(lr) for lr, _, _ in each])
    low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (logs.low, logs.high))
    best = mean_interval([loss for _, loss, _ in each])
    return Curve(cell, losses, Estimate(math.exp(logs.mean), low, high, logs.n), all(x for *_, x in each), best)


def optimum(losses: dict[float, float | None]) -> tuple[float, float, bool]:
    """Return the learning rate of the lowest loss, the lowest loss of the grid, and whether it lies inside the grid."""
    points = sorted((math.log(lr), math.inf if loss is None else loss) for lr, loss in losses.items())
    k = min(range(len(points)), key=lambda i: points[i][1])
    x, y = points[k]
    if not math.isfinite(y):
        raise invalid("learning rates", "such that at least one run trains", sorted(losses))
    if k == 0 or k == len(points) - 1:
        return math.exp(x), y, False
    (x_0, y_0), (x_2, y_2) = points[k - 1], points[k + 1]
    if not (math.isfinite(y_0) and math.isfinite(y_2)):
        return math.exp(x), y, True
    left, right = (y - y_0) / (x - x_0), (y_2 - y) / (x_2 - x)  # slopes on both sides of the best point
    vertex = (x_0 + x) / 2 - left * (x_2 - x_0) / 2 / (right - left) if right > left else x
    return math.exp(min(max(vertex, x_0), x_2)), y, True


def spread(curves: Sequence[Curve]) -> dict[str, float]:
    """Largest over smallest best learning rate of the cells that differ in width or depth alone.

    Groups with a cell that diverged, or whose best learning rate is at an edge of the grid, have none.
    """
    groups: dict[str, list[float | None]] = {}
    for curve in curves:
        cell, known = curve.cell, curve.inside and not curve.diverged
        rates = groups.setdefault(f"{cell.parametrization}, {cell.scaling.label}", [])
        rates.append(curve.optimum.mean if known else None)
    whole = {name: [rate for rate in rates if rate is not None] for name, rates in groups.items()}
    return {name: max(rates) / min(rates) for name, rates in whole.items() if len(rates) == len(groups[name])}


def train_once(config: Config) -> float | None:
    """Train without a run folder. Returns the validation loss of the EMA weights, None if the run diverged."""
    from scalelong.training.examples import Examples
    from scalelong.training.trainer import NonFiniteError, Trainer

    trainer = Trainer(config, Examples(config, config.data.split))
    held_out = Examples(config, config.data.validation)
    try:
        for _ in range(config.train.steps):
            trainer.step()
    except NonFiniteError:
        return None
    loss = trainer.validation_loss(held_out, config.validate.n, trainer.ema.net)
    return loss if math.isfinite(loss) else None


def _run(trials: TrialFile, config: Config) -> float | None:
    value: float | None = trials.run(json.dumps(config.to_dict(), sort_keys=True), partial(train_once, config))
    return value
