"""The last snapshots for people and trackers: a table, and named scalars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from scalelong._text import number
from scalelong.monitor.alarms import Alarm
from scalelong.monitor.curves import norm_curves
from scalelong.monitor.log import Entry, lookup
from scalelong.monitor.points import Points

LEGEND = (
    "norm: on the training batch, of the backbone h_i or of a block's output; growth: p of norm ∝ step^p over the "
    "window; absolute oscillation: spread of the norm around its smoothed curve over the window; relative oscillation: "
    "of one-step changes of log(norm) over the window, on the probe and (on training batches)"
)
RATIO = "; ratio: κ_i·skip to backbone at the join, on the probe"
_HEADS = ("norm", "growth", "absolute osc.", "relative osc.")
Row = list[str | float | None]


class Trend(NamedTuple):
    """The norm at one point over a window of snapshots, on training batches."""

    norm: float | None  # at the last snapshot
    growth: float | None  # p of norm ∝ step^p, from three snapshots on
    absolute: float | None  # the absolute oscillation, from ten snapshots on


def trends(entries: Sequence[Entry], name: str, width: int) -> list[Trend]:
    """Return the trend of every h_i ("backbone") or block ("blocks")."""
    rows = [lookup(entry, "train", name) or [None] * width for entry in entries]
    if not rows:
        return [Trend(None, None, None)] * width
    norms = torch.tensor([[math.nan if value is None else value for value in row] for row in rows], dtype=torch.float64)
    steps = torch.tensor([float(entry["step"]) for entry in entries], dtype=torch.float64)
    curves = norm_curves(steps, norms, late=torch.ones(len(steps), dtype=torch.bool))
    fitted = zip(curves.growth.tolist(), curves.band.tolist(), strict=True)
    return [Trend(last, *(_known(value) for value in pair)) for last, pair in zip(rows[-1], fitted, strict=True)]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Summary:
    """The last snapshots and the active alarms. Prints as a table, outermost skip first."""

    points: Points
    entries: tuple[Entry, ...]
    alarms: tuple[Alarm, ...]
    blocks: bool = False  # print a table of blocks too; a network without long skips has only that

    @property
    def entry(self) -> Entry | None:
        """The last snapshot."""
        return self.entries[-1] if self.entries else None

    def __str__(self) -> str:
        points, entry = self.points, self.entry
        title = f"{points.network}: " + (f"{points.n} long skips" if points.n else "no known long skips, blocks only")
        if entry is None:
            return f"{title}; no snapshot yet"
        title += f"; step {entry['step']}, relative oscillation over {lookup(entry, 'oscillation', 'jumps')} jumps"
        values = {
            "gradient norm": lookup(entry, "grad", "total"),
            "its relative oscillation": lookup(entry, "oscillation", "grad", "total"),
            "loss": lookup(entry, "loss", "mean"),
            "distance to the EMA": lookup(entry, "drift", "total"),
        }
        known = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
        lines = [title, *(_table(self._joins(entry)) if points.n else [])]
        lines += _table(self._blocks(entry)) if self.blocks or not points.n else []
        lines += [LEGEND + RATIO if points.n else LEGEND, *([known] if known else [])]
        return "\n".join([*lines, *(map(str, self.alarms) if self.alarms else ["no alarms"])])

    __repr__ = __str__

    def _joins(self, entry: Entry) -> list[Row]:
        rows: list[Row] = [["i", "from", "to", "κ_i", "ratio", *_HEADS]]
        found = trends(self.entries, "backbone", self.points.n)
        for i, (site, trend) in enumerate(zip(self.points.sites, found, strict=True), start=1):
            ratio, kappa = lookup(entry, "probe", "ratio", i), lookup(entry, "kappa", "mean", i)
            row = [str(i), site.source or "?", site.path, kappa, ratio]
            rows.append([*row, *trend, _oscillation(entry, "backbone", i)])
        return rows

    def _blocks(self, entry: Entry) -> list[Row]:
        rows: list[Row] = [["block", *_HEADS, "gradient norm"]]
        found = trends(self.entries, "blocks", len(self.points.blocks))
        for k, (path, trend) in enumerate(zip(self.points.blocks, found, strict=True), start=1):
            rows.append([path, *trend, _oscillation(entry, "blocks", k), lookup(entry, "grad", "blocks", k)])
        return rows


def _table(rows: list[Row]) -> list[str]:
    cells = [[value if isinstance(value, str) else number(value, 3) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["─" * width for width in widths])
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def scalars(points: Points, entries: Sequence[Entry]) -> dict[str, float]:
    """Return the quantities worth plotting as `stability/…`. Values that are missing or not finite are left out."""
    if not entries:
        return {}
    entry = entries[-1]
    paths: dict[str, tuple[str | int, ...]] = {
        "grad_norm": ("grad", "total"),
        "relative_oscillation/grad_norm": ("oscillation", "grad", "total"),
        "loss": ("loss", "mean"),
        "loss_max": ("loss", "max"),
        "ema_drift": ("drift", "total"),
    }
    for i in range(1, points.n + 1):
        paths |= {
            f"norm/skip_{i}": ("train", "skip", i),
            f"norm_probe/skip_{i}": ("probe", "skip", i),
            f"norm_probe/backbone_{i}": ("probe", "backbone", i),
            f"ratio/skip_{i}": ("probe", "ratio", i),
            f"kappa/skip_{i}": ("kappa", "mean", i),
        }
    values = {name: lookup(entry, *path) for name, path in paths.items()}
    named = {"backbone": [f"backbone_{i}" for i in range(1, points.n + 1)], "blocks": list(points.blocks)}
    for part, names in named.items():
        for k, (name, trend) in enumerate(zip(names, trends(entries, part, len(names)), strict=True), start=1):
            values |= {
                f"norm/{name}": trend.norm,
                f"growth/{name}": trend.growth,
                f"absolute_oscillation/{name}": trend.absolute,
                f"relative_oscillation/{name}": lookup(entry, "oscillation", "probe", part, k),
                f"relative_oscillation_train/{name}": lookup(entry, "oscillation", "train", part, k),
            }
    values["alarms"] = float(len(entry.get("alarms", ())))
    return {f"stability/{name}": value for name, value in values.items() if value is not None}


def _oscillation(entry: Entry, name: str, k: int) -> str:
    probe, train = (number(lookup(entry, "oscillation", part, name, k), 3) for part in ("probe", "train"))
    return f"{probe} ({train})"
