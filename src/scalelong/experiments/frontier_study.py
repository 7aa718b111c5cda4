"""`scalelong frontier`: the stability frontier of network × optimizer × scaling × N × width × steps on digits."""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
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
from scalelong.experiments.statistics import Estimate, linear_fit, mean_interval, paired_ratio
from scalelong.experiments.trials import TrialFile
from scalelong.process import VPSDE
from scalelong.progress import track
from scalelong.scaling import Scaling
from scalelong.skips import apply, scale_skip
from scalelong.theory.bounds import gradient_path_sums
from scalelong.theory.stacked import StackedUNet

TRIALS = "trials.jsonl"
BATCH = 64
SIDE, DEPTH = 8, 2  # pixels of a digit's side; matrices per block of Eq. 3's network
FACTORS = {"skips": "N", "width": "width", "steps": "steps"}  # of a study, with their symbols: what has a size
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
    """The network of Eq. 3 on square images: their pixels are its width m."""

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:  # (B, 1, √m, √m) -> (B, 1, √m, √m)
        return super().forward(x.flatten(1)).view_as(x)


def _uvit(skips: int, width: int, seed: int) -> nn.Module:
    from scalelong.models import UViT

    return UViT(
        img_size=SIDE, patch_size=2, in_chans=1, embed_dim=width, depth=2 * skips, num_heads=4, mlp_time_embed=True,
        init_std=0.02 * math.sqrt(512 / width),
    )  # fmt: skip


def _unet(skips: int, width: int, seed: int) -> nn.Module:
    """diffusers' U-Net at two resolutions: conv_in, the downsampler and 2·layers blocks are N = 2·layers + 2 skips."""
    from scalelong.models import build_unet

    if skips < 4 or skips % 2:
        raise invalid("--skips of the network unet", "even numbers >= 4", skips)
    return build_unet(
        "cifar10", sample_size=SIDE, in_channels=1, out_channels=1, block_out_channels=(width, width),
        norm_num_groups=8, layers_per_block=skips // 2 - 1, down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2, add_attention=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A network of the study. `build` takes (N, width, seed); `widths` says which widths `fits` accepts."""

    build: Callable[[int, int, int], nn.Module]
    width: int
    widths: str = "integers >= 1"
    fits: Callable[[int], bool] = lambda width: True


NETWORKS: dict[str, Network] = {
    "eq3": Network(
        lambda skips, width, seed: FlatEq3(width, skips, DEPTH, init="norm-preserving", seed=seed),
        64, "squares, because an image's pixels are the width: 16, 64, 256", lambda m: math.isqrt(m) ** 2 == m,
    ),
    "conv-add": Network(lambda skips, width, seed: ConvUNet(skips, "add", width), 16),
    "conv-cat": Network(lambda skips, width, seed: ConvUNet(skips, "cat", width), 16),
    "uvit": Network(_uvit, 64, "multiples of 4", lambda width: width % 4 == 0),
    "unet": Network(_unet, 32, "multiples of 8", lambda width: width % 8 == 0),
}  # fmt: skip


def build_network(network: str, skips: int, scaling: Scaling, seed: int, width: int | None = None) -> nn.Module:
    """Build an untrained network; all scalings of one seed share its weights. The global random state is restored."""
    entry = NETWORKS[network]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalingWarning)  # skips that are almost cut are part of the study
        torch.default_generator.manual_seed(seed)
        return apply(entry.build(skips, entry.width if width is None else width, seed), scaling)


def digits_batch(seed: int, step: int, side: int = SIDE) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, the network's time and ε of one training step on digits of side × side pixels, by counter."""
    images, process = _digits(side), VPSDE()
    x_0 = images[counter.integers(seed, 0, step, 0, BATCH, len(images))]
    t = process.times(counter.uniform(seed, 1, step, 0, BATCH))
    eps = counter.normal(seed, 2, step, 0, BATCH, x_0.shape[1:])
    return process.add_noise(x_0, eps, t), process.network_time(t).float(), eps


@cache
def _digits(side: int) -> Tensor:
    from scalelong.data import load

    images = torch.from_numpy(load("digits", split="train").images.copy())
    images = images.permute(0, 3, 1, 2).float() / 127.5 - 1  # (n, 1, 8, 8) in [-1, 1]
    return images if side == SIDE else F.interpolate(images, size=(side, side), mode="bilinear", antialias=True)


# ---------------------------------------------------------------------------------------------------- study
@dataclass(frozen=True)
class Cell:
    """One setting of a study; every seed searches its frontier."""

    network: str
    optimizer: str
    scaling: Scaling
    skips: int
    width: int
    steps: int

    @property
    def key(self) -> str:
        """Identify the cell's trials in the file of a study."""
        names = [self.network, self.optimizer, self.scaling.to_dict(), self.skips, self.steps]
        other = [] if self.width == NETWORKS[self.network].width else [self.width]
        return json.dumps(names + other, sort_keys=True)

    def __str__(self) -> str:
        return ", ".join([self.network, self.optimizer, self.scaling.label, *size_text(self)])

    def trial(self, seed: int, lr: float) -> Trial:
        make_net = partial(build_network, self.network, self.skips, self.scaling, width=self.width)
        make_batch = partial(digits_batch, side=math.isqrt(self.width)) if self.network == "eq3" else digits_batch
        return run_trial(make_net, make_batch, lr, optimizer=self.optimizer, steps=self.steps, seed=seed)


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


@dataclass(frozen=True)
class Exponents:
    """How the frontier of a scaling depends on size: p of frontier ∝ N^p · width^p · steps^p, fitted together.

    `frontier` and `ratio` (to the unscaled network, paired by seed) have the factors with several levels; `ratio` is
    empty for the unscaled network itself.
    """

    network: str
    optimizer: str
    scaling: Scaling
    frontier: dict[str, Estimate]
    ratio: dict[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"scaling": self.scaling.to_dict(), "label": self.scaling.label}


def cells(
    networks: Sequence[str],
    optimizers: Sequence[str],
    scalings: Sequence[Scaling],
    skips: Sequence[int],
    steps: Sequence[int],
    widths: Sequence[int] = (),
) -> list[Cell]:
    """All combinations, each once, checked by building every network once. No widths: each network's own."""
    for option, values in (("--network", networks), ("--optimizer", optimizers), ("--scalings", scalings)):
        if not values:
            raise invalid(option, "one or more names, comma-separated", "")
    for network in networks:
        if network not in NETWORKS:
            raise unknown("network", network, NETWORKS)
        for width in widths:
            if width < 1 or not NETWORKS[network].fits(width):
                raise invalid(f"--width of the network {network}", NETWORKS[network].widths, width)
    for optimizer in optimizers:
        if optimizer not in START:
            raise unknown("optimizer", optimizer, START)
    for option, least, smallest in (("--skips", 1, min(skips)), ("--steps", 10, min(steps))):
        if smallest < least:
            raise invalid(option, f"integers >= {least}", smallest)
    made = [
        Cell(network, optimizer, scaling, n, width, length)
        for network, optimizer in product(networks, optimizers)
        for scaling in scalings
        for n, width, length in product(skips, widths or [NETWORKS[network].width], steps)
    ]
    for network, n, scaling, width in dict.fromkeys((c.network, c.skips, c.scaling, c.width) for c in made):
        build_network(network, n, scaling, 0, width)
    return list(dict.fromkeys(made))


@dataclass(frozen=True)
class Frontiers:
    """The rows of a study, their fits over sizes, and a sentence on each search that found no frontier."""

    rows: list[Row]
    exponents: list[Exponents]
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
    rows = [_row(cell, frontiers) for cell in study if cell in frontiers]
    return Frontiers(rows, fit_exponents(rows), list(failed.values()))


def fit_exponents(rows: Sequence[Row]) -> list[Exponents]:
    """Fit every scaling's frontier and ratio over the sizes of a study; one point per cell and seed."""
    rates = {row.cell: {seed: low for seed, (low, _) in row.frontier.brackets.items()} for row in rows}
    fits = []
    for network, optimizer, scaling in dict.fromkeys((c.network, c.optimizer, c.scaling) for c in rates):
        own = [c for c in rates if (c.network, c.optimizer, c.scaling) == (network, optimizer, scaling)]
        factors = several(own)
        points, ratios = [], []
        for cell in own:
            at, base = [math.log(getattr(cell, name)) for name in factors], _baseline(cell, rates)
            points += [(at, math.log(lr)) for lr in rates[cell].values()]
            if base is not None and base != cell:
                ratios += [(at, math.log(lr / rates[base][seed])) for seed, lr in rates[cell].items()]
        frontier, ratio = (_exponents(factors, kept) for kept in (points, ratios))
        if frontier:
            fits.append(Exponents(network, optimizer, scaling, frontier, ratio))
    return fits


def size_text(cell: Cell, names: Iterable[str] = FACTORS) -> list[str]:
    """The sizes of a cell in words: N = 6, width 64, 100 steps."""
    words = {"skips": f"N = {cell.skips}", "width": f"width {cell.width}", "steps": f"{cell.steps:,} steps"}
    return [words[name] for name in names]


def several(study: Sequence[Cell]) -> list[str]:
    """The factors in which the cells differ."""
    return [name for name in FACTORS if len({getattr(cell, name) for cell in study}) > 1]


def _exponents(factors: Sequence[str], points: Sequence[tuple[list[float], float]]) -> dict[str, Estimate]:
    if not factors or not points:
        return {}
    fit = linear_fit([at for at, _ in points], [value for _, value in points])
    return {} if fit is None else dict(zip(factors, fit, strict=True))


def _baseline(cell: Cell, others: Iterable[Cell]) -> Cell | None:
    """The unscaled network of the same setting."""
    return next((c for c in others if c.scaling.is_identity and replace(c, scaling=cell.scaling) == cell), None)


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
            "scaling": cell.scaling.to_dict(), "skips": cell.skips, "width": cell.width, "steps": cell.steps,
            "lr": list(rates), "loss": [math.fsum(x.values()) / len(x) for x in losses],
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
    base = _baseline(cell, frontiers)
    ratio = predicted = None
    if base is not None:
        rates = [{seed: low for seed, (low, _) in frontiers[c].brackets.items()} for c in (cell, base)]
        ratio = paired_ratio(*rates)
        own, other = predicted_rate(cell.scaling, cell.skips), predicted_rate(base.scaling, base.skips)
        if cell.network == "eq3" and cell.optimizer == "sgd" and own and other:
            predicted = own / other
    return Row(cell, frontiers[cell], ratio, predicted)


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
