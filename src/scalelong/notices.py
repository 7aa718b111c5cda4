"""What there is to say about a choice of κ_1 … κ_N before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

UPPER = 5.0  # the paper's constant: "a rough upper bound of 5", below which 97 % of its ratios lie
SMALLEST = 0.01  # below it a skip is as good as cut
PAPER_MEAN = 1.22  # the paper's mean ratio over CIFAR-10, CelebA and ImageNet


@dataclass(frozen=True)
class Notice:
    """Something worth saying about a choice of coefficients. `level` is "info" or "warning"."""

    level: str
    text: str

    def __str__(self) -> str:
        return self.text


def kappa_notices(
    coefficients: Sequence[float], kappa: float | None = None, mean_ratio: float | None = None
) -> list[Notice]:
    """What there is to say about κ_1 … κ_N: Σκ² outside [mean ratio, min(5, N)], and a skip that is all but cut.

    `kappa` is the base of CS where there is one; without `mean_ratio` the paper's 1.22 stands in.
    """
    n, total = len(coefficients), math.fsum(kappa_i**2 for kappa_i in coefficients)
    cap = min(UPPER, float(n))
    mean, whose = (
        (PAPER_MEAN, "the paper's mean ratio") if mean_ratio is None else (mean_ratio, "the data's mean ratio")
    )
    notices = []
    if total < min(mean, cap) * (1 - 1e-9):
        text = (
            f"Σκ² = {total:.2f} is below {whose} {number(mean)}: the output may be too small for the noise it predicts"
        )
        notices.append(Notice("info", text))
    elif total > cap * (1 + 1e-9):
        text = f"Σκ² = {total:.2f} is above {cap:g}, the upper end of the paper's range: features may oscillate more"
        notices.append(Notice("info", text))
    if kappa is not None and n > 1 and min(coefficients) < SMALLEST:
        text = (
            f"kappa = {kappa:g} with {n} long skips scales one of them by {min(coefficients):.2g}, which all but cuts "
            f"it; kappa from {SMALLEST ** (1 / (n - 1)):.2f} up keeps every skip at {SMALLEST:g} or more"
        )
        notices.append(Notice("warning", text))
    return notices


def number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"
