"""Sums of κ_i² and the kappa of CS that gives one (Section 4.1). No torch import."""

import math
from collections.abc import Sequence

from scalelong.scaling.base import SMALLEST, UPPER


def sum_of_squares(coefficients: Sequence[float], start: int = 1) -> float:
    """Σ_{j=start}^N κ_j²; an empty sum is 0."""
    return math.fsum(kappa * kappa for kappa in coefficients[start - 1 :])


def log_geometric_sum(log_ratio: float, n: int) -> float:
    """log(1 + r + … + r^{n−1}) for r = exp(log_ratio): log n at r = 1, 0 at r = 0, −inf for n = 0."""
    if n <= 0:
        return -math.inf
    if log_ratio == -math.inf or n == 1:
        return 0.0
    if abs(log_ratio) < 1e-300:  # the limit r → 1; expm1 would return denormal numbers
        return math.log(n)
    decay = -abs(log_ratio)  # for r > 1, sum powers of 1/r and multiply by r^{n−1}
    log_sum = math.log(-math.expm1(n * decay)) - math.log(-math.expm1(decay))
    return log_sum + (n - 1) * log_ratio if log_ratio > 0 else log_sum


def cs_sum(kappa: float, n: int) -> float:
    """Σ_{i=1}^N κ^{2(i−1)}, the sum of squares of CS."""
    return math.exp(log_geometric_sum(2 * math.log(kappa), n)) if kappa > 0 else 1.0


def kappa_for_sum(total: float, n: int) -> float:
    """Solve Σ_{i=1}^N κ^{2(i−1)} = total for kappa in [0, 1], by bisection; a total outside [1, N] gives an end."""
    if not 1 < total < n:
        return 0.0 if total <= 1 < n else 1.0  # with one skip, κ_1 = κ^0 = 1 for every kappa
    low, high = 0.0, 1.0
    for _ in range(50):  # to 1e-15; the sum increases with kappa
        middle = (low + high) / 2
        low, high = (middle, high) if cs_sum(middle, n) < total else (low, middle)
    return (low + high) / 2


def rounded_within(kappa: float, low: float, high: float) -> float:
    """Round to two decimals, or up to two, without leaving [low, high]; otherwise return it as it is."""
    return next((k for k in (round(kappa, 2), math.ceil(kappa * 100) / 100) if low <= k <= high), kappa)


def choose_kappa(mean_ratio: float, n: int) -> tuple[float, float, float, str]:
    """Return (low, high, recommended, reason) of kappa for a mean ratio and N long skips.

    The recommended kappa puts Σκ² at the geometric mean of the mean ratio and the cap. If that would scale the
    innermost skip below 0.01, kappa is raised as far as the range allows.
    """
    cap = min(UPPER, float(n))
    if n == 1:
        return 1.0, 1.0, 1.0, "with one long skip, κ_1 = kappa^0 = 1 and CS changes nothing"
    high = kappa_for_sum(cap, n)
    if mean_ratio > cap:
        limit = "the paper's bound of 5" if cap == UPPER else f"the largest sum of {n} long skips"
        reason = (
            f"the mean ratio {mean_ratio:.3g} is above {limit} (Σκ² ≤ {cap:g}), so the range is empty and its upper "
            "end is recommended; check the scale of the data, or whether this objective and process ask for scaling"
        )
        return high, high, high, reason
    low = kappa_for_sum(mean_ratio, n)
    middle = kappa_for_sum(math.sqrt(max(mean_ratio, 1.0) * cap), n)
    keeps_all = SMALLEST ** (1 / (n - 1))  # the kappa that scales the innermost skip by SMALLEST
    raised = min(max(middle, keeps_all), high)
    # Round to two decimals, the precision of the estimate, without leaving the range.
    recommended = rounded_within(raised, max(low, min(keeps_all, raised)), high)
    least = f"the mean ratio {mean_ratio:.2f}" if mean_ratio >= 1 else f"1 (the mean ratio {mean_ratio:.2f} is less)"
    between = f"the geometric mean of {least} and the cap {cap:g}"
    if raised > middle:
        reason = (
            f"{between} gives kappa = {middle:.2f}, which scales the innermost of {n} skips by "
            f"{middle ** (n - 1):.2g}; raised to scale it by {recommended ** (n - 1):.2g}"
        )
    else:
        any_kappa = "; any kappa reaches the mean ratio, because κ_1 = 1 alone gives Σκ² ≥ 1" if mean_ratio < 1 else ""
        reason = f"Σκ² = {cs_sum(recommended, n):.2f} is {between}{any_kappa}"
    return low, high, recommended, reason
