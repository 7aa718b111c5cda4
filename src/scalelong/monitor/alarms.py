"""Alarms: what is wrong, in which module, at which timesteps, since when. A function of the looks in a window."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from scalelong.errors import ScaleLongError
from scalelong.monitor.log import Entry, number
from scalelong.monitor.oscillation import Window, spread, typical
from scalelong.monitor.points import Points


@dataclass(frozen=True)
class Limits:
    """When the monitor raises an alarm. Comparisons are with the looks of the same window.

    growth        oscillation on the probe: the newer half of the window against the older half, from half of the next
                  limit on, and so for the typical jump as well as for the standard deviation
    oscillation   oscillation on the probe over the newer half, whatever it was before
    spike         a gradient norm or loss: so many robust standard deviations of its logarithm above the median …
    gradient_factor, loss_factor   … and so many times the median
    ratio_growth  skip-to-backbone ratio: the newest tenth of the window against its oldest tenth
    looks         at least so many looks (or differences) on either side before anything is compared; an oscillation or
                  a ratio that is back within so many looks is the same alarm
    """

    growth: float = 3.0
    oscillation: float = 0.1
    spike: float = 6.0
    gradient_factor: float = 5.0
    loss_factor: float = 2.0
    ratio_growth: float = 4.0
    looks: int = 10

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ScaleLongError(f"limits: {f.name} is a number above 0, not {value!r}")
        if self.looks < 2:
            raise ScaleLongError(f"limits: looks is at least 2, not {self.looks}")


@dataclass(frozen=True)
class Alarm:
    """kind: "nonfinite", "oscillation", "gradient", "loss" or "ratio"; `since` is the step where it began.

    `value` stands against `reference`; `times` is the range of timesteps where it is worst, where that is known.
    """

    kind: str
    step: int
    since: int
    module: str
    what: str
    skip: int | None = None
    times: tuple[float, float] | None = None
    value: float | None = None
    reference: float | None = None
    advice: str = ""

    def __str__(self) -> str:
        at = "" if self.times is None else f", worst at timesteps {self.times[0]:g} to {self.times[1]:g}"
        since = f" since step {self.since}" if self.since != self.step else ""
        return f"step {self.step}: {self.what}{since}{at}. {self.advice}"

    def to_dict(self, whole: bool) -> dict[str, Any]:
        """For the log: whole where it is new, its name and beginning while it lasts."""
        if not whole:
            return {"kind": self.kind, "module": self.module, "since": self.since}
        values = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        values |= {key: number(values[key]) for key in ("value", "reference") if key in values}
        kept = {key: value for key, value in values.items() if key not in ("what", "advice")}
        return {**kept, "text": str(self)}


@dataclass(frozen=True)
class Finding:
    """What is wrong now, before it is known since when and what to do."""

    kind: str
    point: int | None  # of `Points`, where it is at one
    module: str
    what: str
    times: tuple[float, float] | None = None
    value: float | None = None
    reference: float | None = None
    since: int | None = None  # where the figures themselves tell


def find(
    points: Points, limits: Limits, entries: Sequence[Entry], window: Window, by_time: Window, edges: Sequence[float]
) -> list[Finding]:
    """What is wrong at the last of `entries`, at most one finding of each kind: the worst."""
    found = [
        _nonfinite(points, entries),
        _oscillation(points, limits, window, by_time, edges),
        _spike(points, limits, entries, edges, "gradient"),
        _spike(points, limits, entries, edges, "loss"),
        _ratio(points, limits, entries),
    ]
    return [finding for finding in found if finding is not None]


def _nonfinite(points: Points, entries: Sequence[Entry]) -> Finding | None:
    bad = entries[-1].get("nonfinite")
    if bad is None:
        return None
    point = bad.get("point")
    name = f"the {bad['of']}" if point is None else points.name_of(point)
    where = "" if point is None else f" on the {bad['of']} batch (the first point that is not)"
    return Finding("nonfinite", point, bad.get("module", points.network), f"{name} is not finite{where}",
                   since=bad.get("since"))  # fmt: skip


def _oscillation(
    points: Points, limits: Limits, window: Window, by_time: Window, edges: Sequence[float]
) -> Finding | None:
    halves = window.halves(limits.looks)
    if halves is None:
        return None
    jumps = [half[:, : points.features] for half in halves]  # the probe's part
    (older, newer), (before_typical, now_typical) = map(spread, jumps), map(typical, jumps)
    # Single jumps lift a standard deviation: that it has grown must show in the typical jump as well.
    grown = (newer >= limits.growth * older) & (now_typical >= limits.growth * before_typical)
    grown &= newer >= 0.5 * limits.oscillation
    over = grown | (newer >= limits.oscillation)
    if not over.any():
        return None
    worst = int(torch.where(over, newer, -math.inf).argmax())
    value, before = float(newer[worst]), float(older[worst])
    verb = f"has grown from {before:.3g} to {value:.3g}" if bool(grown[worst]) else f"is {value:.3g}"
    others = int(over.sum()) - 1
    more = f" (and at {others} other points)" if others else ""
    return Finding(
        "oscillation", worst, points.module_of(worst), f"the oscillation of {points.name_of(worst)} {verb}{more}",
        _worst_times(points, worst, by_time, edges), value, before if math.isfinite(before) else None,
    )  # fmt: skip


def _worst_times(points: Points, point: int, by_time: Window, edges: Sequence[float]) -> tuple[float, float] | None:
    """The timestep bin in which the nearest followed point oscillates most."""
    row = points.skip_of(point) if points.n else point + 1
    spreads = by_time.oscillation()
    return None if row is None or spreads is None else _bin(edges, spreads.view(-1, len(edges) - 1)[row - 1])


def _spike(
    points: Points, limits: Limits, entries: Sequence[Entry], edges: Sequence[float], kind: str
) -> Finding | None:
    """The greatest of the last steps against those of the looks before it."""
    key = "grad" if kind == "gradient" else "loss"
    series = [(entry.get(key) or {}).get("max") for entry in entries]
    *before, now = series
    usual = [math.log(value) for value in before if value]
    if not now or len(usual) < limits.looks:
        return None
    median = statistics.median(usual)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in usual)  # of a normal one: its sigma
    factor = limits.gradient_factor if kind == "gradient" else limits.loss_factor
    above = math.log(now) - median
    if above < math.log(factor) or above < limits.spike * deviation:
        return None
    figures = entries[-1][key]
    times = _worst_loss_times(entries, edges)
    module = points.network
    if kind == "gradient" and figures.get("blocks"):
        module = _worst_gradient(points, entries) or module
    name = "gradient norm" if kind == "gradient" else "loss"
    what = f"the {name} {now:.3g} is {math.exp(above):.3g} times its median over the window"
    if module != points.network:
        what += f", most of all in {module}"
    return Finding(kind, _point_of(points, module), module, what, times, now, math.exp(median), figures.get("at"))


def _worst_gradient(points: Points, entries: Sequence[Entry]) -> str | None:
    """The block whose gradient at this look stands highest above its own median."""
    now = entries[-1]["grad"]["blocks"]
    best, name = -math.inf, None
    for k, value in enumerate(now):
        past = [e["grad"]["blocks"][k] for e in entries[:-1] if (e.get("grad") or {}).get("blocks")]
        usual = [v for v in past if v]
        if value and usual and (above := value / statistics.median(usual)) > best:
            best, name = above, points.blocks[k]
    return name


def _worst_loss_times(entries: Sequence[Entry], edges: Sequence[float]) -> tuple[float, float] | None:
    """The timestep bin whose loss stands highest above its own median."""
    now = (entries[-1].get("loss") or {}).get("bins")
    if not now:
        return None
    above = []
    for k, value in enumerate(now):
        past = [(e.get("loss") or {}).get("bins") for e in entries[:-1]]
        usual = [bins[k] for bins in past if bins and bins[k]]
        above.append(value / statistics.median(usual) if value and usual else math.nan)
    return _bin(edges, torch.tensor(above))


def _ratio(points: Points, limits: Limits, entries: Sequence[Entry]) -> Finding | None:
    """Skip-to-backbone: the medians of the window's newest and oldest tenth."""
    rows = [ratio for e in entries if (ratio := (e.get("probe") or {}).get("ratio"))]
    if not points.n or len(rows) < 2 * limits.looks:
        return None
    tenth = max(1, len(rows) // 10)
    best, worst = limits.ratio_growth, None
    for k in range(points.n):
        old, new = ([row[k] for row in part if row[k]] for part in (rows[:tenth], rows[-tenth:]))
        if old and new and (growth := statistics.median(new) / statistics.median(old)) >= best:
            best, worst = growth, (k + 1, statistics.median(old), statistics.median(new))
    if worst is None:
        return None
    i, before, value = worst
    point = points.point("joined", i)
    what = f"the ratio of long skip {i} to the backbone it joins has run from {before:.3g} to {value:.3g}"
    return Finding("ratio", point, points.module_of(point), what, None, value, before)


def _point_of(points: Points, module: str) -> int | None:
    """A point of the module: that of a long skip where it feeds or consumes one."""
    for i, site in enumerate(points.sites, start=1):
        if module in (site.source, site.path) or site.path.startswith(f"{module}."):
            return points.point("out", i)
    return points.block(points.blocks.index(module)) if module in points.blocks else None


def _bin(edges: Sequence[float], values: Tensor) -> tuple[float, float] | None:
    if values.isnan().all():
        return None
    k = int(torch.where(values.isnan(), -math.inf, values).argmax())
    return float(edges[k]), float(edges[k + 1])
