"""The last snapshot for people and trackers: a table, and named scalars."""

from dataclasses import dataclass

from scalelong._text import number
from scalelong.monitor.alarms import Alarm
from scalelong.monitor.log import Entry, lookup
from scalelong.monitor.points import Points

LEGEND = (
    "norms on the probe; ratio: κ_i·skip to backbone at the join; oscillation: of the backbone h_i over the window, "
    "on the probe and (on training batches)"
)


@dataclass(frozen=True)
class Summary:
    """The last snapshot and the active alarms. Prints as a table, outermost skip first."""

    points: Points
    entry: Entry | None
    alarms: tuple[Alarm, ...]

    def __str__(self) -> str:
        points, entry = self.points, self.entry
        title = f"{points.network}: " + (f"{points.n} long skips" if points.n else "no known long skips, blocks only")
        if entry is None:
            return f"{title}; no snapshot yet"
        title += f"; step {entry['step']}, oscillation over {lookup(entry, 'oscillation', 'jumps')} jumps"
        values = {
            "gradient norm": lookup(entry, "grad", "total"),
            "its oscillation": lookup(entry, "oscillation", "grad", "total"),
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
            rows: list[list[str | float | None]] = [["block", "norm", "oscillation", "gradient norm"]]
            for k, path in enumerate(self.points.blocks, start=1):
                norm, gradient = lookup(entry, "probe", "blocks", k), lookup(entry, "grad", "blocks", k)
                rows.append([path, norm, _oscillation(entry, "blocks", k), gradient])
            return rows
        rows = [["i", "from", "to", "κ_i", "skip", "backbone", "ratio", "oscillation"]]
        for i, site in enumerate(self.points.sites, start=1):
            norms = [lookup(entry, "probe", measure, i) for measure in ("skip", "backbone", "ratio")]
            kappa, oscillation = lookup(entry, "kappa", "mean", i), _oscillation(entry, "backbone", i)
            rows.append([str(i), site.source or "?", site.path, kappa, *norms, oscillation])
        return rows


def scalars(points: Points, entry: Entry) -> dict[str, float]:
    """Return the quantities worth plotting as `stability/…`. Values that are missing or not finite are left out."""
    paths: dict[str, tuple[str | int, ...]] = {
        "grad_norm": ("grad", "total"),
        "oscillation/grad_norm": ("oscillation", "grad", "total"),
        "loss": ("loss", "mean"),
        "loss_max": ("loss", "max"),
        "ema_drift": ("drift", "total"),
    }
    for i in range(1, points.n + 1):
        paths |= {
            f"norm/skip_{i}": ("probe", "skip", i),
            f"norm/backbone_{i}": ("probe", "backbone", i),
            f"ratio/skip_{i}": ("probe", "ratio", i),
            f"kappa/skip_{i}": ("kappa", "mean", i),
            f"oscillation/backbone_{i}": ("oscillation", "probe", "backbone", i),
            f"oscillation_train/backbone_{i}": ("oscillation", "train", "backbone", i),
        }
    for k, path in enumerate(points.blocks if not points.n else (), start=1):
        paths[f"norm/{path}"] = ("probe", "blocks", k)
        paths[f"oscillation/{path}"] = ("oscillation", "probe", "blocks", k)
    values = {name: lookup(entry, *path) for name, path in paths.items()}
    values["alarms"] = float(len(entry.get("alarms", ())))
    return {f"stability/{name}": value for name, value in values.items() if value is not None}


def _oscillation(entry: Entry, name: str, k: int) -> str:
    probe, train = (number(lookup(entry, "oscillation", part, name, k), 3) for part in ("probe", "train"))
    return f"{probe} ({train})"
