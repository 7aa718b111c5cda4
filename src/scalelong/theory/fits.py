"""Least-squares lines, power-law exponents and R²: the package's one line fit."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scalelong.errors import invalid


class Line(NamedTuple):
    """y ≈ slope·x + intercept."""

    slope: float
    intercept: float
    r_squared: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line by least squares. Needs at least two different values of x."""
    if len(x) != len(y) or len(x) < 2 or max(x) == min(x):
        raise invalid("x and y", "of equal length with at least two different x", (list(x), list(y)))
    slope, intercept = statistics.linear_regression(x, y)
    return Line(slope, intercept, r_squared(y, [slope * value + intercept for value in x]))


def r_squared(y: Sequence[float], predicted: Sequence[float]) -> float:
    """1 − Σ(y − ŷ)²/Σ(y − ȳ)²: 1 is perfect, 0 is as good as the mean, below 0 is worse."""
    mean = statistics.fmean(y)
    total = math.fsum((value - mean) ** 2 for value in y)
    error = math.fsum((a - b) ** 2 for a, b in zip(y, predicted, strict=True))
    if total == 0:
        return 1.0 if error == 0 else -math.inf
    return 1 - error / total


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ∝ x^p, from a line through the logarithms."""
    return fit_line([math.log(value) for value in x], [math.log(value) for value in y]).slope
