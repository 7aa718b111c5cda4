"""Curves thinned for a page: few points that still show every spike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scalelong.runs.logs import Series

POINTS = 300


def thin(series: Series, points: int = POINTS) -> dict[str, Any] | None:
    """At most `points` buckets of equally many entries: mean step and mean value, with the least and the greatest.

    Values that are not finite are left out. Short curves are given as they are, without a range. None: no point.
    """
    finite = series.finite()
    n = len(finite)
    if n == 0:
        return None
    if n <= points:
        return {"x": numbers(finite.steps, 9), "y": numbers(finite.values)}
    starts = np.linspace(0, n, points + 1).astype(int)[:-1]
    counts = np.diff(np.append(starts, n))
    x = np.add.reduceat(finite.steps, starts) / counts
    y = np.add.reduceat(finite.values, starts) / counts
    x[0], x[-1] = finite.steps[0], finite.steps[-1]  # a curve begins and ends where the run does
    low, high = np.minimum.reduceat(finite.values, starts), np.maximum.reduceat(finite.values, starts)
    return {"x": numbers(x, 7), "y": numbers(y), "low": numbers(low), "high": numbers(high)}


def numbers(values: Any, digits: int = 5) -> list[float | int | None]:
    """For JSON: five significant digits are more than a screen shows; None for what is not finite."""
    return [number(value, digits) for value in np.asarray(values, dtype=np.float64).tolist()]


def number(value: float, digits: int = 5) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
