"""From two looks one step apart to an entry of stability.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalelong.monitor.buffer import Buffered
from scalelong.monitor.log import Entry, number, rounded
from scalelong.monitor.oscillation import Window, jumps
from scalelong.monitor.parameter_norms import BlockNorms
from scalelong.monitor.points import MEASURES, Points
from scalelong.monitor.recorder import Norms


@dataclass(frozen=True)
class Snapshot:
    """What was seen of one step: its own forward pass and gradient, and the probe with the same weights."""

    step: int
    probe: Norms | None
    train: Norms | None
    gradients: BlockNorms | None
    by_time: list[list[float]]  # of each followed point the bins, on the probe; NaN where it is not known


class Layout:
    """The order in which everything that jumps stands in one vector: probe, training batch, gradients."""

    def __init__(self, points: Points, bins: int) -> None:
        self.points, self.bins = points, bins
        self.followed = points.n or len(points.blocks)  # points whose timesteps are told apart: every h_i, or blocks

    def norms(self, look: Snapshot) -> list[float]:
        """Everything that jumps."""
        w, g = self.points, look.gradients
        found: list[float] = []
        for norms in (look.probe, look.train):
            found += [math.nan] * w.features if norms is None else norms.total[: w.features]
        return found + ([math.nan] * (1 + len(w.blocks)) if g is None else [g.total, *g.blocks])

    def by_time(self, norms: Norms | None, members: list[list[int]] | None) -> list[list[float]]:
        """The norm of h_i (or of a block's output) over the samples of each timestep bin."""
        if norms is None or norms.squares is None or members is None:
            return [[math.nan] * self.bins] * self.followed
        start = self.points.point("backbone", 1) if self.points.n else self.points.block(0)
        return [
            [math.sqrt(sum(row[k] for k in inside) / len(inside)) if inside else math.nan for inside in members]
            for row in norms.squares[start : start + self.followed]
        ]

    def told(self, values: list[float], digits: int) -> dict[str, Any]:
        """What `norms` lists, as named lists for JSON."""
        f = self.points.features
        total, *blocks = rounded(values[2 * f :], digits)
        return {
            "probe": self.features(values[:f], digits),
            "train": self.features(values[f : 2 * f], digits),
            "grad": {"total": total, "blocks": blocks},
        }

    def read(self, told: dict[str, Any] | None) -> Tensor | None:
        """`told` read back."""
        if not told:
            return None
        w = self.points
        flat: list[float | None] = []
        for part in ("probe", "train"):
            named = told.get(part) or {}
            for measure in MEASURES:
                flat += named.get(measure) or [None] * w.n
            flat += named.get("blocks") or [None] * len(w.blocks)
        grad = told.get("grad") or {}
        flat += [grad.get("total"), *(grad.get("blocks") or [None] * len(w.blocks))]
        return _tensor(flat)

    def read_by_time(self, told: dict[str, Any] | None) -> Tensor | None:
        rows = (told or {}).get("by_time")
        return _tensor([value for row in rows for value in row]) if rows else None

    def features(self, values: list[float], digits: int) -> dict[str, Any]:
        w = self.points
        named = {m: rounded(values[k * w.n : (k + 1) * w.n], digits) for k, m in enumerate(MEASURES)} if w.n else {}
        return {**named, "blocks": rounded(values[len(MEASURES) * w.n :], digits)}


def make_entry(
    layout: Layout,
    now: Snapshot,
    before: Snapshot | None,
    last: int,
    noted: Buffered,
    drift: BlockNorms | None,
    kappas: list[Any],
) -> Entry:
    """The look without what is compared over a window. A jump is over exactly one step; `last` is the last entry's."""
    w = layout.points
    entry: Entry = {"step": now.step}
    for name, norms in (("probe", now.probe), ("train", now.train)):
        if norms is not None:
            entry[name] = layout.features(norms.total[: w.features], 5) | {"n": norms.n}
            if w.n:
                joined = norms.total[w.features :]
                backbone = norms.total[w.point("backbone", 1) : w.point("backbone", w.n) + 1]
                entry[name]["ratio"] = rounded(
                    j / b if b > 0 else math.nan for j, b in zip(joined, backbone, strict=True)
                )
    if now.probe is not None and not all(math.isnan(norm) for row in now.by_time for norm in row):
        entry["probe"]["by_time"] = [rounded(row) for row in now.by_time]
    if kappas:
        entry["kappa"] = {name: rounded(k[place] for k in kappas) for place, name in enumerate(("mean", "min", "max"))}
    entry |= _gradient_part(now, before, last, noted)
    if noted.loss is not None:
        entry["loss"] = noted.loss
    if drift is not None:
        entry["drift"] = {"total": number(drift.total), "blocks": rounded(drift.blocks)}
    if before is not None and before.step == now.step - 1:
        entry["jump"] = layout.told(jumps(layout.norms(now), layout.norms(before)), 3)
        if "by_time" in entry.get("probe", {}):
            rows = zip(now.by_time, before.by_time, strict=True)
            entry["jump"]["by_time"] = [rounded(jumps(*pair), 3) for pair in rows]
    bad = _nonfinite(w, now, noted)
    return entry | ({"nonfinite": bad} if bad else {})


def oscillations(layout: Layout, entry: Entry, window: Window, by_time: Window, former: Entry | None) -> Entry:
    """What the window shows with this look in it; `former`, what it showed before, where that is the same."""
    changes = [window.add(layout.read(entry.get("jump"))), by_time.add(layout.read_by_time(entry.get("jump")))]
    if former is not None and not any(changes):
        return former
    found: Entry = {"jumps": len(window.rows)}
    spreads, in_bins = window.oscillation(), by_time.oscillation()
    if spreads is not None and found["jumps"] >= 2:
        found |= layout.told(spreads.tolist(), 3)
        if in_bins is not None:
            found["by_time"] = [rounded(row, 3) for row in in_bins.view(layout.followed, layout.bins).tolist()]
    return found


def _gradient_part(now: Snapshot, before: Snapshot | None, last: int, noted: Buffered) -> Entry:
    totals = list(noted.gradients)
    totals += [
        (look.step, look.gradients.total)
        for look in (before, now)
        if look is not None and look.step > last and look.gradients is not None and math.isfinite(look.gradients.total)
    ]
    part: Entry = {}
    if now.gradients is not None:
        part = {"total": number(now.gradients.total), "blocks": rounded(now.gradients.blocks)}
    if totals:
        at, most = max(totals, key=lambda pair: pair[1])
        part |= {"max": number(most), "at": at}
    return {"grad": part} if part else {}


def _nonfinite(w: Points, now: Snapshot, noted: Buffered) -> Entry | None:
    """The first thing that is not finite, and the first step that says so."""
    since = min((s for s in (noted.bad_loss, noted.bad_gradient) if s is not None), default=now.step)
    for name, norms in (("probe", now.probe), ("training", now.train)):
        if norms is not None and norms.nonfinite is not None:
            return {"of": name, "point": norms.nonfinite, "module": w.module_of(norms.nonfinite), "since": since}
    g = now.gradients
    if noted.bad_gradient is not None or (g is not None and not math.isfinite(g.total)):
        module = w.network if g is None or g.bad is None else w.blocks[g.bad]
        return {"of": "gradient", "module": module, "since": since}
    return {"of": "loss", "module": w.network, "since": since} if noted.bad_loss is not None else None


def _tensor(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
