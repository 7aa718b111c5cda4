"""Oscillation of a norm (the paper's Fig. 1): how much its logarithm jumps from one step to the next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


def oscillation(norms: Sequence[float | None]) -> float | None:
    """The standard deviation of the step-to-step differences of log(norm), of a norm at consecutive steps.

    A step without a norm (None, NaN, 0) leaves out the two differences it is part of. Fewer than two differences
    have no spread: None.
    """
    logs = torch.tensor([math.nan if norm is None else log(norm) for norm in norms], dtype=torch.float64)
    value = float(spread((logs[1:] - logs[:-1])[:, None]))
    return None if math.isnan(value) else value


def log(norm: float) -> float:
    """log(norm), and NaN where a norm is 0, infinite or not there: no difference may be taken from it."""
    return math.log(norm) if 0 < norm < math.inf else math.nan


def jumps(now: Sequence[float], before: Sequence[float]) -> list[float]:
    """The differences of the logarithms."""
    return [log(a) - log(b) for a, b in zip(now, before, strict=True)]


def spread(differences: Tensor) -> Tensor:
    """The standard deviation of each column of (looks, points), NaN left out; NaN for fewer than two values."""
    there = ~differences.isnan()
    count = there.sum(0)
    mean = torch.where(there, differences, 0.0).sum(0) / count
    variance = torch.where(there, differences - mean, 0.0).square().sum(0) / count
    return torch.where(count >= 2, variance.sqrt(), math.nan)


def typical(differences: Tensor) -> Tensor:
    """The median size of each column's differences, which a single jump does not lift."""
    return differences.abs().nanmedian(0).values


class Window:
    """The step-to-step differences of many logarithms at the last `length` looks (None where a look has none)."""

    def __init__(self, length: int) -> None:
        self._rows: deque[Tensor | None] = deque(maxlen=length)

    @property
    def rows(self) -> list[Tensor]:
        return [row for row in self._rows if row is not None]

    def add(self, differences: Tensor | None) -> bool:
        """Whether anything in the window is another than before: a look that has none takes the place of another."""
        new = None if differences is None or bool(differences.isnan().all()) else differences
        gone = self._rows[0] if len(self._rows) == self._rows.maxlen else None
        self._rows.append(new)
        return new is not None or gone is not None

    def oscillation(self) -> Tensor | None:
        """Of every point, over the window."""
        rows = self.rows
        return spread(torch.stack(rows)) if rows else None

    def halves(self, least: int) -> tuple[Tensor, Tensor] | None:
        """The differences of the older and of the newer half, once each has `least` of them."""
        rows = self.rows
        middle = len(rows) // 2
        if middle < least:
            return None
        return torch.stack(rows[:middle]), torch.stack(rows[middle:])
