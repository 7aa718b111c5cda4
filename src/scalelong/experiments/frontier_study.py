"""`scalelong frontier`: the stability frontier of network × optimizer × scaling × N on the embedded digits."""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalelong import counter
from scalelong.errors import InvalidValueError, ScalingWarning, invalid, unknown
from scalelong.experiments.frontier import (
    START,
    StableLearningRate,
    Trial,
    bisect,
    lr_sensitivity,
    parallel,
    run_trial,
    summarize,
)
from scalelong.experiments.statistics import Estimate, mean_interval, paired_ratio
from scalelong.experiments.trials import TrialFile
from scalelong.process import VPSDE
from scalelong.progress import track
from scalelong.scaling import Scaling
from scalelong.skips import apply, scale_skip
from scalelong.theory.bounds import gradient_path_sums
from scalelong.theory.stacked import StackedUNet

TRIALS = "trials.jsonl"
BATCH = 64
WIDTH, DEPTH = 64, 2  # of Eq. 3's network: 8×8 pixels, two matrices per block
GRID = [10 ** (k / 4) for k in range(-12, 1)]  # three decades, relative to the largest learning rate


# ------------------------------------------------------------------------------------------------- networks
class ConvUNet(nn.Module):
    """Eq. 3 with 3×3 convolutions at three resolutions, no normalization and no time, as in restoration networks.

    Args:
        skips: N, the number of long skips.
        join: "add" adds a skip to the backbone as in Eq. 3; "cat" concatenates them.
    """

    def __init__(self, skips: int, join: str = "add", channels: int = 16, size: int = 8) -> None:
        super().__init__()
        self.join, self.first = join, nn.Conv2d(1, channels, 3, padding=1)
        self.encoders = nn.ModuleList(_block(channels, channels) for _ in range(skips))
        self.middle = _block(channels, channels)
        wide = channels if join == "add" else 2 * channels
        self.decoders = nn.ModuleList(_block(wide, channels) for _ in range(skips))
        self.last = nn.Conv2d(channels, 1, 3, padding=1)
        self.halved = {skips // 3, 2 * skips // 3} - {0}  # blocks after which the resolution halves
        self.long_skips = (channels,) * skips

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:  # (B, 1, H, W) -> (B, 1, H, W)
        x, skips = self.first(x), []
        for i, encoder in enumerate(self.encoders, start=1):
            x = encoder(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2) if i in self.halved else x
        x = self.middle(x)
        for i in range(len(skips), 0, -1):
            x = F.interpolate(x, scale_factor=2.0) if i in self.halved else x
            skip = scale_skip(self, skips.pop(), i)
            x = self.decoders[i - 1](x + skip if self.join == "add" else torch.cat([x, skip], 1))
        return self.last(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, ReLU, convolution; initialized so that the block preserves the norm (Kaiming, then 1/fan_in)."""
    first, last = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    for layer, gain in ((first, 2.0), (last, 1.0)):
        nn.init.normal_(layer.weight, std=math.sqrt(gain / layer.weight[0].numel()))
        nn.init.zeros_(cast(Tensor, layer.bias))
    return nn.Sequential(first, nn.ReLU(), last)


class FlatEq3(StackedUNet):
    """The network of Eq. 3 on 8×8 images: 64 pixels are its width m."""

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:  # (B, 1, 8, 8) -> (B, 1, 8, 8)
        return super().forward(x.flatten(1)).view_as(x)


def _uvit(skips: int) -> nn.Module:
    from scalelong.models import UViT

    return UViT(
        img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=2 * skips, num_heads=4, mlp_time_embed=True,
        init_std=0.02 * math.sqrt(512 / 64),
    )  # fmt: skip


def _unet(skips: int) -> nn.Module:
    """diffusers' U-Net at two resolutions: conv_in, the downsampler and 2·layers blocks are N = 2·layers + 2 skips."""
    from scalelong.models import build_unet

    if skips < 4 or skips % 2:
        raise invalid("--skips of the network unet", "even numbers >= 4", skips)
    return build_unet(
        "cifar10", sample_size=8, in_channels=1, out_channels=1, block_out_channels=(32, 32), norm_num_groups=8,
        layers_per_block=skips // 2 - 1, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        add_attention=False,
    )  # fmt: skip


NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "eq3": lambda skips, seed: FlatEq3(WIDTH, skips, DEPTH, init="norm-preserving", seed=seed),
    "conv-add": lambda skips, seed: ConvUNet(skips, "add"),
    "conv-cat": lambda skips, seed: ConvUNet(skips, "cat"),
    "uvit": lambda skips, seed: _uvit(skips),
    "unet": lambda skips, seed: _unet(skips),
}


def build_network(network: str, skips: int, scaling: Scaling, seed: int) -> nn.Module:
    """Build an untrained network; all scalings of one seed share its weights. The global random state is restored."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)  # skips that are almost cut are part of the study
        torch.default_generator.manual_seed(seed)
        return apply(NETWORKS[network](skips, seed), scaling)


def digits_batch(seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, the network's time and ε of one training step, from the counter-based generator."""
    images, process = _digits(), VPSDE()
    x_0 = images[counter.integers(seed, 0, step, 0, BATCH, len(images))]
    t = process.times(counter.uniform(seed, 1, step, 0, BATCH))
    eps = counter.normal(seed, 2, step, 0, BATCH, x_0.shape[1:])
    return process.add_noise(x_0, eps, t), process.network_time(t).float(), eps


@cache
def _digits() -> Tensor:
    from scalelong.data import load

    images = torch.from_numpy(load("digits", split="train").images.copy())
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1  # (n, 1, 8, 8) in [-1, 1]


# ---------------------------------------------------------------------------------------------------- study
@dataclass(frozen=True)
class Cell:
    """One setting of a study; every seed searches its frontier."""

    network: str
    optimizer: str
    scaling: Scaling
    skips: int
    steps: int

    @property
    def key(self) -> str:
        """Identify the cell's trials in the file of a study."""
        return json.dumps(
            [self.network, self.optimizer, self.scaling.to_dict(), self.skips, self.steps], sort_keys=True
        )

    def __str__(self) -> str:
        return f"{self.network}, {self.optimizer}, {self.scaling.label}, N = {self.skips}"

    def trial(self, seed: int, lr: float) -> Trial:
        make_net = partial(build_network, self.network, self.skips, self.scaling)
        return run_trial(make_net, digits_batch, lr, optimizer=self.optimizer, steps=self.steps, seed=seed)


@dataclass(frozen=True)
class Row:
    """The frontier of a cell, its ratio to the unscaled network (paired by seed) and the theory's ratio."""

    cell: Cell
    frontier: StableLearningRate
    ratio: Estimate | None
    predicted: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        cell = asdict(self.cell) | {"scaling": self.cell.scaling.to_dict(), "label": self.cell.scaling.label}
        found = asdict(self.frontier)
        ratio = None if self.ratio is None else asdict(self.ratio)
        return cell | {"lr": found["lr"], "low": found["low"], "high": found["high"], "brackets": found["brackets"],
                       "trials": len(found["trials"]), "ratio": ratio, "predicted_ratio": self.predicted}  # fmt: skip


def cells(
    networks: Sequence[str], optimizers: Sequence[str], scalings: Sequence[Scaling], skips: Sequence[int], steps: int
) -> list[Cell]:
    """All combinations, each once, checked by building every network once."""
    for option, values in (("--network", networks), ("--optimizer", optimizers), ("--scalings", scalings)):
        if not values:
            raise invalid(option, "one or more names, comma-separated", "")
    for network in networks:
        if network not in NETWORKS:
            raise unknown("network", network, NETWORKS)
    for optimizer in optimizers:
        if optimizer not in START:
            raise unknown("optimizer", optimizer, START)
    for n in skips:
        if n < 1:
            raise invalid("--skips", "integers >= 1", n)
    made = list(dict.fromkeys(Cell(*choice, steps) for choice in product(networks, optimizers, scalings, skips)))
    for network, n, scaling in dict.fromkeys((c.network, c.skips, c.scaling) for c in made):
        build_network(network, n, scaling, 0)
    return made


@dataclass(frozen=True)
class Frontiers:
    """The rows of a study, and the cells without one: a sentence each on the search that found no frontier."""

    rows: list[Row]
    failures: list[str]


def measure_frontier(study: Sequence[Cell], seeds: Sequence[int], out: Path, jobs: int) -> Frontiers:
    """Search the frontier of every cell and seed. Trials are appended to OUT/trials.jsonl; a second call resumes."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = [(cell, seed) for seed in seeds for cell in study]
    found: dict[Cell, list[Trial]] = defaultdict(list)
    failed: dict[Cell, str] = {}
    searches = parallel(partial(_search, TrialFile(out / TRIALS)), tasks, jobs)
    for (cell, seed), trials in zip(tasks, track(searches, "searching", len(tasks)), strict=True):
        if isinstance(trials, str):
            failed.setdefault(cell, f"{cell}, seed {seed}: {trials}")
        else:
            found[cell] += trials
    frontiers = {cell: summarize(trials) for cell, trials in found.items() if cell not in failed}
    return Frontiers([_row(cell, frontiers) for cell in study if cell in frontiers], list(failed.values()))


def measure_sensitivity(
    study: Sequence[Cell], seeds: Sequence[int], rates: Sequence[float], out: Path, jobs: int
) -> list[dict[str, Any]]:
    """Final loss against learning rate for every cell, averaged over seeds; a diverged run counts as untrained."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = [(cell, seed, lr) for seed in seeds for cell in study for lr in rates]
    run = partial(_run, TrialFile(out / TRIALS))
    found: dict[Cell, dict[float, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for (cell, _, lr), trial in zip(tasks, track(parallel(run, tasks, jobs), "training", len(tasks)), strict=True):
        found[cell][lr].append(trial)
    rows = []
    for cell, by_rate in found.items():
        losses = [{t.seed: t.initial if t.diverged else float(t.final or 0) for t in by_rate[lr]} for lr in rates]
        initial = {t.seed: t.initial for t in by_rate[rates[0]]}
        each = [
            lr_sensitivity({lr: loss[s] for lr, loss in zip(rates, losses, strict=True)}, initial[s]) for s in seeds
        ]
        rows.append({
            "network": cell.network, "optimizer": cell.optimizer, "label": cell.scaling.label,
            "scaling": cell.scaling.to_dict(), "skips": cell.skips,
            "steps": cell.steps, "lr": list(rates), "loss": [math.fsum(x.values()) / len(x) for x in losses],
            "diverged": [sum(t.diverged for t in by_rate[lr]) for lr in rates],
            "sensitivity": asdict(mean_interval(each)),
        })  # fmt: skip
    return rows


def predicted_rate(scaling: Scaling, skips: int) -> float | None:
    """The frontier that Theorem 3.3 predicts for SGD on Eq. 3, up to a constant: 1/Σ_W E‖∇_W ℓ‖²/ℓ at the start.

    For a quadratic loss ‖∇ℓ‖² ≤ 2λℓ, and SGD is stable up to 2/λ. None for a learned scaling.
    """
    kappas = scaling.coefficients(skips)
    if kappas is None:
        return None
    sums = gradient_path_sums(kappas, "norm-preserving", DEPTH)
    return 1 / math.fsum(value for row in sums for value in row)


def _row(cell: Cell, frontiers: dict[Cell, StableLearningRate]) -> Row:
    base = next((c for c in frontiers if c.scaling.is_identity and _same_setting(c, cell)), None)
    ratio = predicted = None
    if base is not None:
        rates = [{seed: low for seed, (low, _) in frontiers[c].brackets.items()} for c in (cell, base)]
        ratio = paired_ratio(*rates)
        own, other = predicted_rate(cell.scaling, cell.skips), predicted_rate(base.scaling, base.skips)
        if cell.network == "eq3" and cell.optimizer == "sgd" and own and other:
            predicted = own / other
    return Row(cell, frontiers[cell], ratio, predicted)


def _same_setting(a: Cell, b: Cell) -> bool:
    return (a.network, a.optimizer, a.skips, a.steps) == (b.network, b.optimizer, b.skips, b.steps)


def _search(trials: TrialFile, task: tuple[Cell, int]) -> list[Trial] | str:
    """The trials of one search, or why it found no frontier."""
    cell, seed = task
    try:
        return list(bisect(lambda lr: _run(trials, (cell, seed, lr)), START[cell.optimizer]))
    except InvalidValueError as error:
        return str(error)


def _run(trials: TrialFile, task: tuple[Cell, int, float]) -> Trial:
    """Run a trial, or take it from an earlier call."""
    cell, seed, lr = task
    key = f"{cell.key} seed {seed} lr {lr!r}"
    if not _is_trial(trials.finished.get(key)):
        trials.finished.pop(key, None)
    return Trial(**trials.run(key, lambda: asdict(cell.trial(seed, lr))))


def _is_trial(result: Any) -> bool:
    """Whether a line of a trials file is whole."""
    kinds = {"lr": float, "seed": int, "initial": float, "final": float | None, "steps": int}
    return (
        isinstance(result, dict)
        and result.keys() == kinds.keys()
        and all(isinstance(result[key], kind) for key, kind in kinds.items())
    )
