"""A look as plain numbers with names, for TensorBoard, W&B and the like."""

from __future__ import annotations

from typing import Any

from scalelong.monitor.log import Entry
from scalelong.monitor.points import Points


def scalars(points: Points, entry: Entry) -> dict[str, float]:
    """`stability/…`: what a curve is worth drawing of, without what is not finite."""
    found: dict[str, Any] = {
        "grad_norm": _get(entry, "grad", "total"),
        "oscillation/grad_norm": _get(entry, "oscillation", "grad", "total"),
        "loss": _get(entry, "loss", "mean"),
        "loss_max": _get(entry, "loss", "max"),
        "ema_drift": _get(entry, "drift", "total"),
        "alarms": float(len(entry.get("alarms", ()))),
    }
    for i in range(1, points.n + 1):
        where = f"skip_{i}"
        found |= {
            f"norm/{where}": _get(entry, "probe", "skip", i),
            f"norm/backbone_{i}": _get(entry, "probe", "backbone", i),
            f"ratio/{where}": _get(entry, "probe", "ratio", i),
            f"kappa/{where}": _get(entry, "kappa", "mean", i),
            f"oscillation/backbone_{i}": _get(entry, "oscillation", "probe", "backbone", i),
            f"oscillation_train/backbone_{i}": _get(entry, "oscillation", "train", "backbone", i),
        }
    if not points.n:
        for k, path in enumerate(points.blocks, start=1):
            found[f"norm/{path}"] = _get(entry, "probe", "blocks", k)
            found[f"oscillation/{path}"] = _get(entry, "oscillation", "probe", "blocks", k)
    return {f"stability/{name}": value for name, value in found.items() if value is not None}


def _get(entry: Entry, *path: str | int) -> Any:
    value: Any = entry
    for key in path:
        if isinstance(key, int):
            value = value[key - 1] if isinstance(value, list) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value
