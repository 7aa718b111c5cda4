"""The last snapshots for people and trackers: a table, and named scalars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scalelong._text import number
from scalelong.monitor.alarms import Alarm
from scalelong.monitor.log import Entry, lookup
from scalelong.monitor.points import Points

LEGEND = (
    "norm: of the backbone h_i on the training batch; growth: p of norm ∝ step^p over the window; absolute "
    "oscillation: spread of the norm around that curve; relative oscillation: of one-step changes of "
    "log(norm) over the window, on the probe and (on training batches); ratio: κ_i·skip to backbone at the join, on "
    "the probe"
)


class Trend(NamedTuple):
    """The norm at one point over a window of snapshots, on training batches."""

    norm: float | None  # at the last snapshot
    growth: float | None  # p of norm ∝ step^p, by least squares on the logarithms
    absolute: float | None  # root mean square of norm − fitted curve


def trend(entries: Sequence[Entry], name: str, k: int) -> Trend:
    """Fit the norms of a point ("backbone" or "blocks", counted from 1). Three snapshots make a fit."""
    known = [(e["step"], value) for e in entries if (value := lookup(e, "train", name, k)) and e["step"] > 0]
    norm = lookup(entries[-1], "train", name, k) if entries else None
    if len(known) < 3:
        return Trend(norm, None, None)
    xs, ys = [math.log(step) for step, _ in known], [math.log(value) for _, value in known]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope /= math.fsum((x - mean_x) ** 2 for x in xs)
    squares = [(value - math.exp(mean_y + slope * (x - mean_x))) ** 2 for x, (_, value) in zip(xs, known, strict=True)]
    return Trend(norm, slope, math.sqrt(math.fsum(squares) / len(squares)))


@dataclass(frozen=True)
class Summary:
    """The last snapshots and the active alarms. Prints as a table, outermost skip first."""

    points: Points
    entries: tuple[Entry, ...]
    alarms: tuple[Alarm, ...]

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
        cells = [[value if isinstance(value, str) else number(value, 3) for value in row] for row in self._rows(entry)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["─" * width for width in widths])
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines = [title, *table, *([LEGEND] if points.n else []), *([known] if known else [])]
        return "\n".join([*lines, *(map(str, self.alarms) if self.alarms else ["no alarms"])])

    __repr__ = __str__

    def _rows(self, entry: Entry) -> list[list[str | float | None]]:
        if not self.points.n:
            rows: list[list[str | float | None]] = [["block", *_HEADS, "gradient norm"]]
            for k, path in enumerate(self.points.blocks, start=1):
                cells = [*trend(self.entries, "blocks", k), _oscillation(entry, "blocks", k)]
                rows.append([path, *cells, lookup(entry, "grad", "blocks", k)])
            return rows
        rows = [["i", "from", "to", "κ_i", "ratio", *_HEADS]]
        for i, site in enumerate(self.points.sites, start=1):
            ratio, kappa = lookup(entry, "probe", "ratio", i), lookup(entry, "kappa", "mean", i)
            cells = [*trend(self.entries, "backbone", i), _oscillation(entry, "backbone", i)]
            rows.append([str(i), site.source or "?", site.path, kappa, ratio, *cells])
        return rows


_HEADS = ("norm", "growth", "absolute osc.", "relative osc.")


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
            f"norm/skip_{i}": ("probe", "skip", i),
            f"norm/backbone_{i}": ("train", "backbone", i),
            f"norm_probe/backbone_{i}": ("probe", "backbone", i),
            f"ratio/skip_{i}": ("probe", "ratio", i),
            f"kappa/skip_{i}": ("kappa", "mean", i),
            f"relative_oscillation/backbone_{i}": ("oscillation", "probe", "backbone", i),
            f"relative_oscillation_train/backbone_{i}": ("oscillation", "train", "backbone", i),
        }
    for k, path in enumerate(points.blocks if not points.n else (), start=1):
        paths[f"norm/{path}"] = ("train", "blocks", k)
        paths[f"relative_oscillation/{path}"] = ("oscillation", "probe", "blocks", k)
    values = {name: lookup(entry, *path) for name, path in paths.items()}
    for i in range(1, points.n + 1):
        found = trend(entries, "backbone", i)
        values |= {f"growth/backbone_{i}": found.growth, f"absolute_oscillation/backbone_{i}": found.absolute}
    values["alarms"] = float(len(entry.get("alarms", ())))
    return {f"stability/{name}": value for name, value in values.items() if value is not None}


def _oscillation(entry: Entry, name: str, k: int) -> str:
    probe, train = (number(lookup(entry, "oscillation", part, name, k), 3) for part in ("probe", "train"))
    return f"{probe} ({train})"
