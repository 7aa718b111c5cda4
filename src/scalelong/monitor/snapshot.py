"""From two snapshots one step apart and the noted losses to an entry of stability.jsonl.

The relative oscillation of a norm is the standard deviation of the step-to-step differences ("jumps") of its logarithm.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scalelong.monitor.log import Entry
from scalelong.monitor.points import MEASURES, Points
from scalelong.monitor.recorder import BlockNorms, Norms, to_cpu

CAPACITY = 10_000  # values buffered if no snapshot is taken


def jumps(now: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return log(now) − log(before), and NaN where either norm is 0, infinite or NaN."""
    pairs = zip(now, before, strict=True)
    return [math.log(a) - math.log(b) if 0 < a < math.inf and 0 < b < math.inf else math.nan for a, b in pairs]


def spread(differences: Tensor) -> Tensor:
    """Return the relative oscillation: the standard deviation of each column of (jumps, points).

    NaN jumps are ignored; a column with fewer than two others has no oscillation, NaN.
    """
    known = ~differences.isnan()
    count = known.sum(0)
    mean = torch.where(known, differences, 0.0).sum(0) / count
    variance = torch.where(known, differences - mean, 0.0).square().sum(0) / count
    return torch.where(count >= 2, variance.sqrt(), math.nan)


def typical(differences: Tensor) -> Tensor:
    """Return the median absolute jump of each column, which a single large jump does not raise."""
    return differences.abs().nanmedian(0).values


class Window:
    """The jumps of all points over the last `length` snapshots; a snapshot may have none."""

    def __init__(self, length: int) -> None:
        self._rows: deque[Tensor | None] = deque(maxlen=length)

    @property
    def rows(self) -> list[Tensor]:
        return [row for row in self._rows if row is not None]

    def add(self, differences: Tensor | None) -> None:
        """Add the jumps of a snapshot."""
        self._rows.append(None if differences is None or bool(differences.isnan().all()) else differences)

    def oscillation(self) -> Tensor | None:
        """Return the relative oscillation of every point over the window, or None for fewer than two jumps."""
        return spread(torch.stack(self.rows)) if len(self.rows) >= 2 else None

    def halves(self, least: int) -> tuple[Tensor, Tensor] | None:
        """Return the jumps of the older and the newer half, or None until each half has `least` of them."""
        rows = self.rows
        middle = len(rows) // 2
        return None if middle < least else (torch.stack(rows[:middle]), torch.stack(rows[middle:]))


@dataclass(frozen=True)
class Buffered:
    """The values noted since the last snapshot."""

    loss: Entry | None
    gradients: list[tuple[int, float]]  # (step, total norm)
    bad_loss: int | None  # the first step whose loss is not finite
    bad_gradient: int | None


class Buffer:
    """Losses and gradient norms of every step, kept on their device until the next snapshot."""

    def __init__(self) -> None:
        self._losses: deque[tuple[int, Tensor, Tensor | None]] = deque(maxlen=CAPACITY)  # (step, losses, timesteps)
        self._gradients: deque[tuple[int, Tensor]] = deque(maxlen=CAPACITY)

    def add(self, step: int, loss: Any, t: Any, grad_norm: Any) -> None:
        if loss is not None:
            values = torch.as_tensor(loss).detach()
            values = values.flatten(1).mean(1) if values.ndim > 1 else values.reshape(-1)
            times = None if t is None else torch.as_tensor(t).detach().reshape(-1)
            self._losses.append((step, values, times if times is not None and times.shape == values.shape else None))
        if grad_norm is not None:
            self._gradients.append((step, torch.as_tensor(grad_norm).detach().reshape(())))

    def collect(self, edges: Sequence[float], after: int) -> Buffered:
        """Return and clear the buffer, with one synchronization for losses and one for gradient norms.

        Gradient norms of steps up to `after` are dropped: the last snapshot measured them itself.
        """
        recent = [(step, norm) for step, norm in self._gradients if step > after]
        norms = to_cpu([norm for _, norm in recent]).tolist() if recent else []
        gradients = [(step, norm) for (step, _), norm in zip(recent, norms, strict=True)]
        bad_gradient = next((step for step, norm in gradients if not math.isfinite(norm)), None)
        losses = list(self._losses)
        self._losses.clear()
        self._gradients.clear()
        if not losses:
            return Buffered(None, gradients, None, bad_gradient)
        values = _concatenate([v for _, v, _ in losses]).double()
        sizes = torch.tensor([len(v) for _, v, _ in losses])
        noted = torch.tensor([step for step, _, _ in losses]).repeat_interleave(sizes)
        steps, of_step = noted.unique(return_inverse=True)  # gradient accumulation may note a step in parts
        means = dict(zip(steps.tolist(), _group_means(values, of_step, len(steps)), strict=True))
        good = {step: mean for step, mean in means.items() if math.isfinite(mean)}
        loss: Entry = {"mean": None, "max": None, "at": None, "steps": len(means)}
        if good:
            at = max(good, key=lambda step: good[step])
            loss |= {"mean": math.fsum(good.values()) / len(good), "max": good[at], "at": at}
        times = [t for _, _, t in losses if t is not None]
        if len(times) == len(losses):
            usable, bins = values.isfinite(), which_bin(_concatenate(times), edges)
            loss["bins"] = _group_means(values[usable], bins[usable], len(edges) - 1)
        return Buffered(loss, gradients, next((step for step in means if step not in good), None), bad_gradient)


def which_bin(times: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the bin of each timestep. Timesteps outside the edges count in the first or last bin."""
    inner = torch.tensor(list(edges[1:-1]), dtype=torch.float64)
    return torch.bucketize(times.double().cpu(), inner, right=True)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.to(parts[0].device, torch.float32) for part in parts]).cpu()


def _group_means(values: Tensor, groups: Tensor, count: int) -> list[float]:
    """Return the mean of the values in each group; NaN for an empty group."""
    return (groups.bincount(values, minlength=count) / groups.bincount(minlength=count)).tolist()


@dataclass(frozen=True)
class Snapshot:
    """The norms of one step: its own forward pass and gradient, and the probe with the same weights."""

    step: int
    probe: Norms | None
    train: Norms | None
    gradients: BlockNorms | None
    by_time: list[list[float]]  # (followed points, timestep bins) on the probe; NaN where unknown
    kappas: list[tuple[float, float, float]]  # (mean, min, max) of κ_1 … κ_N; empty if learned and not recorded


class Layout:
    """The order of everything that jumps in one vector: probe, training batch, gradients, probe by timestep bin.

    The points followed by timestep bin are every h_i, or every block in a network without long skips.
    """

    def __init__(self, points: Points, bins: int) -> None:
        n, blocks = points.n, len(points.blocks)
        self.points, self.bins, self.followed = points, bins, n or blocks
        features = [*((measure, n) for measure in MEASURES if n), ("blocks", blocks)]
        self.fields = [(part, name, width) for part in ("probe", "train") for name, width in features]
        self.fields += [("grad", "total", 1), ("grad", "blocks", blocks)]
        self.size = sum(width for _, _, width in self.fields)  # by_time starts here

    def vector(self, snapshot: Snapshot) -> list[float]:
        f, g = self.points.features, snapshot.gradients
        parts = [[math.nan] * f if norms is None else norms.total[:f] for norms in (snapshot.probe, snapshot.train)]
        gradients = [math.nan] * (1 + len(self.points.blocks)) if g is None else [g.total, *g.blocks]
        return [*chain(*parts), *gradients, *chain(*snapshot.by_time)]

    def unflatten(self, values: list[float]) -> Entry:
        """Turn a vector into named lists."""
        named: Entry = {}
        start = 0
        for part, name, width in self.fields:
            piece = values[start : start + width]
            named.setdefault(part, {})[name] = piece[0] if name == "total" else piece
            start += width
        by_time = values[start:]
        if not all(map(math.isnan, by_time)):
            named["by_time"] = [by_time[k : k + self.bins] for k in range(0, len(by_time), self.bins)]
        return named

    def flatten(self, named: Entry | None) -> Tensor | None:
        """Turn named lists, read from a log, back into a vector."""
        if not named:
            return None
        flat: list[float | None] = []
        for part, name, width in self.fields:
            value = (named.get(part) or {}).get(name)
            flat += [value] if name == "total" else value or [None] * width
        flat += chain(*(named.get("by_time") or [[None] * self.bins] * self.followed))
        return torch.tensor([math.nan if value is None else value for value in flat], dtype=torch.float64)

    def by_time(self, norms: Norms | None, members: list[list[int]] | None) -> list[list[float]]:
        """Return the norm of each followed point over the probe's samples in each timestep bin."""
        if norms is None or norms.squares is None or members is None:
            return [[math.nan] * self.bins] * self.followed
        start = self.points.start("backbone" if self.points.n else "blocks")
        return [
            [math.sqrt(sum(row[k] for k in inside) / len(inside)) if inside else math.nan for inside in members]
            for row in norms.squares[start : start + self.followed]
        ]


def make_entry(
    layout: Layout, now: Snapshot, before: Snapshot | None, last: int, buffered: Buffered, drift: BlockNorms | None
) -> Entry:
    """Build the entry of a snapshot with exact values; `last` is the previous entry's step.

    It contains jumps only if `before` is exactly one step earlier.
    """
    points, backbone = layout.points, layout.points.start("backbone")
    entry: Entry = {"step": now.step, **layout.unflatten(layout.vector(now))}
    by_time = entry.pop("by_time", None)
    for name, norms in (("probe", now.probe), ("train", now.train)):
        if norms is None:
            del entry[name]
            continue
        entry[name]["n"] = norms.n
        if points.n:
            pairs = zip(norms.total[points.start("joined") :], norms.total[backbone:], strict=False)
            entry[name]["ratio"] = [x / h if h > 0 else math.nan for x, h in pairs]
    if now.probe is not None and by_time is not None:
        entry["probe"]["by_time"] = by_time
    if now.kappas:
        entry["kappa"] = dict(zip(("mean", "min", "max"), map(list, zip(*now.kappas, strict=True)), strict=True))
        if now.probe is not None and now.probe.dead:
            entry["kappa"]["dead"] = list(now.probe.dead)
    entry["grad"] = _gradient_part(now, before, last, buffered)
    entry["loss"] = buffered.loss
    entry["drift"] = None if drift is None else {"total": drift.total, "blocks": drift.blocks}
    if before is not None and before.step == now.step - 1:
        entry["jump"] = layout.unflatten(jumps(layout.vector(now), layout.vector(before)))
    entry["nonfinite"] = _nonfinite(points, now, buffered)
    return {key: value for key, value in entry.items() if value is not None}


def _gradient_part(now: Snapshot, before: Snapshot | None, last: int, buffered: Buffered) -> Entry | None:
    """The gradient norms of this step, and the largest norm since the last entry."""
    totals, part = list(buffered.gradients), Entry()
    for s in (before, now):
        if s is not None and s.gradients is not None and s.step > last:
            totals.append((s.step, s.gradients.total))
    if now.gradients is not None:
        part = {"total": now.gradients.total, "blocks": now.gradients.blocks}
    if totals := [(step, total) for step, total in totals if math.isfinite(total)]:
        at, largest = max(totals, key=lambda pair: pair[1])
        part |= {"max": largest, "at": at}
    return part or None


def _nonfinite(points: Points, now: Snapshot, buffered: Buffered) -> Entry | None:
    """Describe the first value that is not finite, and the first step that shows it."""
    since = min((s for s in (buffered.bad_loss, buffered.bad_gradient) if s is not None), default=now.step)
    for name, norms in (("probe", now.probe), ("training", now.train)):
        if norms is not None and norms.nonfinite is not None:
            module = points.all[norms.nonfinite].module
            return {"of": name, "point": norms.nonfinite, "module": module, "since": since}
    g = now.gradients
    if buffered.bad_gradient is not None or (g is not None and not math.isfinite(g.total)):
        module = points.network if g is None or g.nonfinite is None else points.blocks[g.nonfinite]
        return {"of": "gradient", "module": module, "since": since}
    return {"of": "loss", "module": points.network, "since": since} if buffered.bad_loss is not None else None
