"""Linear probe of a frozen network: how well one linear layer reads classes from each block, at several times."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalelong._modules import device_of
from scalelong.diffusion.network import Denoiser
from scalelong.errors import DataError, InvalidValueError, invalid, unknown
from scalelong.files import tensors_sha256, write_text
from scalelong.kappa import checked_shape
from scalelong.objective import Objective, get_objective
from scalelong.progress import Tracker
from scalelong.representation.features import Extractor, Labelled, choose_blocks, dtype_of
from scalelong.representation.linear import FITS, fit_accuracy, probe_features
from scalelong.skips.blocks import blocks_of

FORMAT = 1
SHARES = (0.01, 0.05, 0.1, 0.2, 0.4)  # of the time range; features are best at little noise
Z = 1.959963984540054  # 95 %
Grid = tuple[tuple[float, ...], ...]  # accuracy by block and time


@dataclass(frozen=True)
class Cell:
    """The accuracy of one block at one time, with a 95 % binomial (Wilson) interval."""

    block: str
    t: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class LinearProbe:
    """The result of `linear_probe`. `accuracy[b][k]` is that of `blocks[b]` at `times[k]`; prints as a table."""

    network: str
    blocks: tuple[str, ...]
    times: tuple[float, ...]  # in the process's own time
    accuracy: Grid
    n_train: int
    n_test: int
    classes: int
    chance: float  # share of the most frequent class among the test images
    fit: str
    seed: int
    pixels: float | None = None  # accuracy of the same classifier on clean pixels
    untrained: Grid | None = None  # of the network before training
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # blocks of the network that a later block follows

    def cell(self, b: int, k: int) -> Cell:
        return Cell(self.blocks[b], self.times[k], self.accuracy[b][k], *wilson(self.accuracy[b][k], self.n_test))

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(self.cell(b, k) for b in range(len(self.blocks)) for k in range(len(self.times)))

    @property
    def best(self) -> Cell:
        """The cell of the highest accuracy. Its interval does not know that it is the best of many."""
        return max(self.cells, key=lambda cell: cell.accuracy)

    @property
    def best_untrained(self) -> float | None:
        return None if self.untrained is None else max(map(max, self.untrained))

    @property
    def conditioning_block(self) -> str | None:
        """The best probed block that `SelfConditioning` accepts, which a later block must follow; None without one."""
        early = [cell for cell in self.cells if cell.block in self.sources]
        return max(early, key=lambda cell: cell.accuracy).block if early else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; docs/representation.md has the format."""
        return {
            "format": FORMAT,
            **asdict(self),
            "best": asdict(self.best),
            "conditioning_block": self.conditioning_block,
        }

    def save(self, path: Path | str) -> None:
        """Write the result as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    def __str__(self) -> str:
        width = max(map(len, (*self.blocks, "block")))
        lines = [" ".join(["block".ljust(width), *(f"{f't={t:g}':>8}" for t in self.times)])]
        for block, row in zip(self.blocks, self.accuracy, strict=True):
            lines.append(" ".join([block.ljust(width), *(f"{value:8.4f}" for value in row)]))
        return "\n".join([*lines, *self.summary()])

    def summary(self) -> list[str]:
        """Return the best cell, the baselines and the notes as lines."""
        best, known = self.best, []
        if self.untrained is not None:
            known.append(f"untrained network {self.best_untrained:.4f}")
        if self.pixels is not None:
            known.append(f"pixels {self.pixels:.4f}")
        where = f"{best.block} at t = {best.t:g}"
        return [
            f"best: {best.accuracy:.4f} (95 % {best.low:.4f} to {best.high:.4f}), {where}",
            f"baselines: {', '.join([*known, f'chance {self.chance:.4f}'])}",
            *(f"note: {note}" for note in self.notes),
        ]


def linear_probe(
    net: nn.Module,
    train: Any,
    test: Any,
    *,
    layers: str | Sequence[str] = "all",
    t: Any = None,
    objective: Any = "eps",
    conditions: Mapping[str, Any] | None = None,
    untrained: nn.Module | None = None,
    pixels: bool = True,
    fit: str = "lbfgs",
    seed: int = 0,
    batch_size: int = 256,
    cache: Path | str | None = None,
    call: Callable[[nn.Module, Tensor, Tensor], Any] | None = None,
    notes: Sequence[str] = (),
) -> LinearProbe:
    """Fit one linear layer on the frozen features of each block: noise at a fixed time, a pass, an average over space.

    Args:
        net: Any network; it runs in eval mode and is not changed.
        train: (images, labels) to fit: uint8 (n, h, w, c) or float (n, c, h, w) in [−1, 1], and integers (n,).
        test: (images, labels) to measure the accuracy on.
        layers: "all" (the blocks of a U-ViT or U-Net; the children of another network), or paths of modules.
        t: Times of the noise in the process's own unit (0 to 1 for "vp", 1 to 1000 for "ddpm", where a number below 1
            is a share of the range): a number, a sequence, an array or a tensor; default: 1 % to 40 % of its range.
        objective: What the network was trained with: a name, an `Objective`, or a process.
        conditions: Constants for every image: `{"y": label}`, `{"context": tokens}`. True labels would leak.
        untrained: The same network before training, as a baseline.
        pixels: Whether to fit clean pixels too, as a baseline.
        fit: "lbfgs" (logistic regression, converged) or "adam" (DDAE's recipe); see `probe_features`.
        seed: Of the noise.
        batch_size: Images per pass.
        cache: A folder that keeps the features, so that another call with the same network and data skips the passes;
            not with `call`.
        call: `call(net, x_t, t)` runs a pass of a network with other arguments than `net(x, t, y=, context=)`.
        notes: Remarks to keep with the result.

    Returns:
        The accuracy of every block at every time, the best cell with its interval, and the baselines.

    Examples:
        >>> net = scalelong.UViT(8, 4, embed_dim=16, depth=2, num_heads=2)
        >>> labels = torch.arange(40) % 2
        >>> images = torch.zeros(40, 3, 8, 8) + 0.8 * labels.view(-1, 1, 1, 1)
        >>> result = scalelong.linear_probe(net, (images, labels), (images, labels), t=0.01)
        >>> result.blocks, result.best.accuracy
        (('in_blocks.0', 'mid_block', 'out_blocks.0'), 1.0)
    """
    if fit not in FITS:
        raise unknown("fit", fit, FITS)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise invalid("batch_size", "an integer >= 1", batch_size)
    chosen = get_objective(objective)
    times = check_times(t, chosen)
    data = as_labelled("train", train), as_labelled("test", test)
    labels = [one.labels for one in data]
    classes = int(max(one.max() for one in labels)) + 1
    if len(labels[0].unique()) < 2:
        raise DataError(f"a probe needs images of two classes or more, got {len(labels[0].unique())} in train")
    paths, own = choose_blocks(net, layers)
    networks = [net] if untrained is None else [net, untrained]
    if cache is not None and call is not None:
        raise InvalidValueError("cache and call exclude each other: stored features do not tell what call does")
    folder = None if cache is None else Path(cache)
    salt = tensors_sha256({name: torch.as_tensor(value) for name, value in (conditions or {}).items()})
    extractors = [
        Extractor(one, _call(one, call, conditions), paths, own, chosen, seed, batch_size, folder, salt)
        for one in networks
    ]
    grids: list[Grid] = []
    parts = (extractors[0].batches(data) + len(paths)) * len(times)
    for extractor, name in zip(extractors, ("the network", "the untrained network"), strict=False):
        columns: list[list[float]] = []
        with Tracker(f"probing {name}", parts) as tracker:
            for time in times:
                columns.append([])
                for train_x, test_x in extractor.features(time, data, tracker).values():
                    columns[-1].append(fit_accuracy(train_x, labels[0], test_x, labels[1], fit, seed))
                    tracker.advance()
        grids.append(tuple(zip(*columns, strict=True)))
        extractors[-1].paths, extractors[-1].drop = extractors[0].paths, False
    return LinearProbe(
        network=type(net).__name__, blocks=tuple(extractors[0].paths), times=times, accuracy=grids[0],
        n_train=len(labels[0]), n_test=len(labels[1]), classes=classes,
        chance=float(labels[1].bincount().max() / len(labels[1])), fit=fit, seed=seed,
        pixels=_pixels(data, fit, seed) if pixels else None,
        untrained=None if untrained is None else grids[1], notes=tuple(notes), sources=tuple(blocks_of(net)[:-1]),
    )  # fmt: skip


def wilson(accuracy: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of n trials."""
    middle, square = accuracy + Z**2 / (2 * n), Z * math.sqrt(accuracy * (1 - accuracy) / n + Z**2 / (4 * n**2))
    low, high = ((middle + sign * square) / (1 + Z**2 / n) for sign in (-1, 1))
    return max(0.0, min(low, accuracy)), min(1.0, max(high, accuracy))  # rounding must not exclude 0 and 1


def check_times(t: Any, objective: Objective) -> tuple[float, ...]:
    """Return the times of a probe in the process's own unit, or raise what is wrong with them.

    Where times are 1, 2, …, a number below 1 is a share of the range.
    """
    process = objective.process
    if t is None:
        t = [share * process.t_max for share in SHARES]
    least, whole = (0.0, "") if process.continuous else (1.0, ", an integer")
    try:
        times: list[float] = torch.as_tensor(t, dtype=torch.float64).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise invalid("t", "a number or several", t) from None
    if not process.continuous:
        times = [float(max(1, round(time * process.t_max))) if 0 < time < 1 else time for time in times]
    for time in times:
        if not least <= time <= process.t_max or (whole and time != round(time)):
            raise invalid("t", f"from {least:g} to {process.t_max:g}{whole} for process {process.name!r}", time)
    if not times:
        raise invalid("t", "at least one time", t)
    return tuple(dict.fromkeys(times))


def as_labelled(name: str, data: Any) -> Labelled:
    """Return (images, labels) as `Labelled`, or raise what is wrong with them."""
    if isinstance(data, Labelled):
        return data
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise invalid(name, "a pair (images, labels)", type(data).__name__)
    images, labels = data
    if labels is None:
        raise DataError(f"a probe needs classes, but {name} has no labels")
    shape, labels = checked_shape(images), torch.as_tensor(labels).cpu()
    if labels.shape != shape[:1] or labels.is_floating_point() or labels.is_complex() or int(labels.min()) < 0:
        raise invalid(f"labels of {name}", f"{shape[0]} integers >= 0", f"{labels.dtype} {tuple(labels.shape)}")
    images = torch.as_tensor(images)
    if images.dtype != torch.uint8:
        low, high = (float(end) for end in images.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DataError(f"images of {name} must be finite, got NaN or infinite values")
        if low >= 0 and high > 1 + 1e-3:  # latents may have any range, but not without a negative value
            got = f"got values from {low:.4g} to {high:.4g}; rescale them or pass uint8 (n, h, w, c)"
            raise DataError(f"float images of {name} must be in [-1, 1], {got}")

    def read(indices: Tensor) -> Tensor:
        x = images[indices.to(images.device)].cpu()
        return x.movedim(-1, 1).float().div(127.5).sub(1) if x.dtype == torch.uint8 else x.float()

    digest = hashlib.sha256(images.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    return Labelled(read, labels.long(), digest)


def _call(net: nn.Module, call: Any, conditions: Mapping[str, Any] | None) -> Callable[[Tensor, Tensor], Any]:
    if call is not None:
        return lambda x, t: call(net, x, t)
    adapted, device, dtype = Denoiser(net), device_of(net), dtype_of(net)
    constants = {name: torch.as_tensor(value, device=device) for name, value in (conditions or {}).items()}
    constants = {name: v.to(dtype) if v.is_floating_point() else v for name, v in constants.items()}
    return lambda x, t: adapted(x, t, **{k: v.expand(len(x), *v.shape) for k, v in constants.items()})


def _pixels(data: tuple[Labelled, Labelled], fit: str, seed: int) -> float:
    with Tracker("probing pixels", 1) as tracker:
        sets = [[one.read(rows) for rows in torch.arange(len(one)).split(1024)] for one in data]
        x, test_x = (torch.cat(parts).flatten(1) for parts in sets)
        accuracy = probe_features(x, data[0].labels, test_x, data[1].labels, fit=fit, seed=seed)
        tracker.advance()
    return accuracy
