"""The last look as a table."""

from __future__ import annotations

from dataclasses import dataclass

from scalelong.monitor.alarms import Alarm
from scalelong.monitor.log import Entry
from scalelong.monitor.points import Points
from scalelong.monitor.scalars import _get

LEGEND = (
    "norms on the probe; ratio: κ_i·skip to backbone at the join; oscillation of the backbone h_i over the window, "
    "probe and (training batch)"
)


@dataclass(frozen=True)
class Summary:
    """What the monitor saw last; prints as a table, outermost skip first."""

    points: Points
    entry: Entry | None
    alarms: tuple[Alarm, ...]

    def __str__(self) -> str:
        w, entry = self.points, self.entry
        skips = f"{w.n} long skips" if w.n else "no long skips known, watched by its blocks"
        if entry is None:
            return f"{w.network}: {skips}; nothing seen yet"
        jumps = _get(entry, "oscillation", "jumps")
        lines = [f"{w.network}: {skips}; step {entry['step']}, oscillation over {jumps} jumps"]
        lines += _skips(w, entry) if w.n else _blocks(w, entry)
        figures = {
            "gradient": _get(entry, "grad", "total"),
            "its oscillation": _get(entry, "oscillation", "grad", "total"),
            "loss": _get(entry, "loss", "mean"),
            "distance to the EMA": _get(entry, "drift", "total"),
        }
        told = [f"{name} {value:.4g}" for name, value in figures.items() if value is not None]
        lines += [", ".join(told)] if told else []
        lines += [str(alarm) for alarm in self.alarms] or ["no alarm"]
        return "\n".join(lines)

    __repr__ = __str__


def _skips(w: Points, entry: Entry) -> list[str]:
    rows = [["i", "from", "to", "κ_i", "skip", "backbone", "ratio", "oscillation"]]
    for i, site in enumerate(w.sites, start=1):
        calm, live = (_figure(_get(entry, "oscillation", part, "backbone", i)) for part in ("probe", "train"))
        rows.append(
            [
                str(i), site.source or "?", site.path, _figure(_get(entry, "kappa", "mean", i)),
                *(_figure(_get(entry, "probe", measure, i)) for measure in ("skip", "backbone", "ratio")),
                f"{calm} ({live})",
            ]
        )  # fmt: skip
    return [*_table(rows), LEGEND]


def _blocks(w: Points, entry: Entry) -> list[str]:
    rows = [["block", "norm", "oscillation", "gradient"]]
    for k, path in enumerate(w.blocks, start=1):
        calm, live = (_figure(_get(entry, "oscillation", part, "blocks", k)) for part in ("probe", "train"))
        norm, gradient = _get(entry, "probe", "blocks", k), _get(entry, "grad", "blocks", k)
        rows.append([path, _figure(norm), f"{calm} ({live})", _figure(gradient)])
    return _table(rows)


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("─" * w for w in widths), *lines[1:]]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
