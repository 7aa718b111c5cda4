"""The statements of the paper's Section 3 as functions, and the closed forms of Sections 4.1 and 6.

Everything that grows like M_0^N is computed as a logarithm, so N, M_0 and m may be as large as they like;
the plain functions give `inf` where a float cannot hold the value. Coefficients are κ_1 … κ_N, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scalelong.errors import ScaleLongError
from scalelong.kappa import kappa_for_sum as kappa_for_sum
from scalelong.kappa import log_geometric_sum, sum_of_squares
from scalelong.scaling import ConstantScaling, FixedScaling, NoScaling, UniformScaling


@dataclass(frozen=True)
class Interval:
    """low ≤ value ≤ high."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Orders:
    """What Sections 3, 4.1 and 6 print for one scaling, as text and as a number (constants left out).

    feature: of ‖h_0‖² (and of the gradient, times the loss).  robustness: the main term of Theorem 3.4.
    """

    feature: str
    feature_value: float
    robustness: str
    log_robustness: float


# ------------------------------------------------------------------------------------------- statements


def feature_norm(
    coefficients: Sequence[float],
    i: int,
    x_norm_sq: float,
    rho: float,
    c1: float = 1.0,
    c2: float = 0.0,
    as_printed: bool = False,
) -> Interval:
    """Theorem 3.1: (1 ∓ ρ)²[c_1‖x_t‖² Σ_{j=i+1}^N κ_j² + c_2], the range of ‖h_i‖² for h_i = f_i, 0 ≤ i ≤ N.

    The statement (Eq. 4) prints the sum from j = i, its proof (Eqs. 44–50) has j = i + 1, which is the right
    one for h_i = f_i: b_i and κ_i come after f_i. `as_printed=True` takes Eq. 4's index.
    """
    n = _check(coefficients)
    _within("i", i, 0, n)
    if not 0 < rho <= 1:
        raise ScaleLongError(f"rho is {rho}; Theorem 3.1 holds for rho in (0, 1]")
    start = max(i, 1) if as_printed else i + 1
    middle = c1 * x_norm_sq * sum_of_squares(coefficients, start) + c2
    return Interval((1 - rho) ** 2 * middle, (1 + rho) ** 2 * middle)


def feature_probability(n: int, m: int, rho: float, factor: float = 1.0, rate: float = 1.0) -> float:
    """Theorem 3.1's probability 1 − O(N) exp(−Ω(mρ²)), at least 0; the paper leaves `factor` and `rate` open."""
    return max(0.0, 1.0 - factor * n * math.exp(-rate * m * rho**2))


def expected_input_norm(m: int, mean_alpha_bar: float, pixel_second_moment: float = 1 / 3) -> float:
    """Lemma 3.2: E‖x_t‖² = (1 − 2E_t ᾱ_t/3)m for x_0 uniform on [−1, 1].

    For other data replace E x_0² = 1/3 by its own second moment: (1 − E_t ᾱ_t·(1 − E x_0²))m.
    """
    if not 0 <= mean_alpha_bar <= 1:
        raise ScaleLongError(f"mean_alpha_bar is {mean_alpha_bar}; it must be between 0 and 1")
    return (1 - mean_alpha_bar * (1 - pixel_second_moment)) * m


def gradient_norm(
    coefficients: Sequence[float], i: int, loss: float, x_norm_sq: float, constant: float = 1.0, c3: float = 0.0
) -> float:
    """Theorem 3.3: constant·(ℓ‖x_t‖² Σ_{j=i}^N κ_j² + c_3), a bound on ‖∇ℓ‖² for any matrix of a_i or b_i.

    `i` = N + 1 stands for the middle block, through which no skip passes.
    """
    n = _check(coefficients)
    _within("i", i, 1, n + 1)
    return constant * (loss * x_norm_sq * sum_of_squares(coefficients, i) + c3)


def log_robustness(coefficients: Sequence[float], log_m0: float, log_l0: float = -math.inf) -> float:
    """The logarithm of Theorem 3.4's bound Σ_i κ_i M_0^i + c_0 with c_0 = M_0^N L_0 (Eq. 65)."""
    n = _check(coefficients)
    terms = [_log(kappa) + i * log_m0 for i, kappa in enumerate(coefficients, start=1)]
    return log_sum_exp([*terms, n * log_m0 + log_l0])


def robustness(coefficients: Sequence[float], m0: float, l0: float = 0.0, epsilon: float = 1.0) -> float:
    """Theorem 3.4: ε_δ[Σ_i κ_i M_0^i + M_0^N L_0] bounds how far the output moves; `inf` where it overflows.

    It is certified when `m0` is max ‖J_b‖‖J_a‖. The paper's M_0 = max ‖b_i∘a_i‖ is smaller, and Eq. 61 moves
    b_1∘a_1 past the inner gradient, which matrices do not allow: with it the bound can be violated.
    """
    return epsilon * _exp(log_robustness(coefficients, _log(m0), _log(l0)))


def log_robustness_product(
    coefficients: Sequence[float], log_norms: Sequence[float], log_l0: float = -math.inf
) -> float:
    """Eq. 65 before the maximum is taken: log[Σ_i κ_i Π_{j≤i} M_j + Π_j M_j·L_0] for the norms M_1 … M_N."""
    n = _check(coefficients)
    if len(log_norms) != n:
        raise ScaleLongError(f"there are {len(log_norms)} norms for {n} long skips")
    terms, product = [], 0.0
    for kappa, log_norm in zip(coefficients, log_norms, strict=True):
        product += log_norm
        terms.append(_log(kappa) + product)
    return log_sum_exp([*terms, product + log_l0])


# ----------------------------------------------------------------------------------------- closed forms


def closed_sum_of_squares(scaling: FixedScaling, n: int, start: int = 1) -> float:
    """Σ_{j=start}^N κ_j² in closed form: N, κ²N, κ^{2(start−1)}(1 − κ^{2(N−start+1)})/(1 − κ²), and reversed."""
    _within("start", start, 1, n + 1)
    count = n - start + 1
    if isinstance(scaling, NoScaling):
        return float(count)
    if isinstance(scaling, UniformScaling):
        return scaling.value**2 * count
    if isinstance(scaling, ConstantScaling):
        log_q = 2 * math.log(scaling.kappa)
        # κ_j² is q^{j−1}, or reversed q^{N−j+1}, whose smallest power over j = start … N is q^1
        first = log_q if scaling.reverse else (start - 1) * log_q
        return _exp(first + log_geometric_sum(log_q, count))
    return sum_of_squares(scaling.coefficients(n), start)


def log_main_term(scaling: FixedScaling, n: int, log_m0: float) -> float:
    """log Σ_i κ_i M_0^i, the main term of Theorem 3.4, in closed form (Section 6's S and S_r)."""
    if isinstance(scaling, NoScaling):
        return log_m0 + log_geometric_sum(log_m0, n)
    if isinstance(scaling, UniformScaling):
        return math.log(scaling.value) + log_m0 + log_geometric_sum(log_m0, n)
    if isinstance(scaling, ConstantScaling):
        log_kappa = math.log(scaling.kappa)
        if scaling.reverse:  # S_r = κ^N M_0 (1 + M_0/κ + … + (M_0/κ)^{N−1})
            return n * log_kappa + log_m0 + log_geometric_sum(log_m0 - log_kappa, n)
        return log_m0 + log_geometric_sum(log_m0 + log_kappa, n)  # S = M_0(1 + κM_0 + … + (κM_0)^{N−1})
    return log_robustness(scaling.coefficients(n), log_m0)


def orders(scaling: FixedScaling, n: int, m: int, log_m0: float) -> Orders:
    """The orders that the paper prints for the standard, universal, CS and reversed CS network.

    The robustness orders keep the largest term, so they presume M_0 > 1 (and κM_0 > 1 for CS).
    """
    features = m * closed_sum_of_squares(scaling, n)
    if isinstance(scaling, NoScaling):
        return Orders("O(N m)", features, "O(N M₀^N)", math.log(n) + n * log_m0)
    if isinstance(scaling, UniformScaling):
        return Orders("O(κ² N m)", features, "O(κ M₀^N)", math.log(scaling.value) + n * log_m0)
    if isinstance(scaling, ConstantScaling):
        log_kappa = math.log(scaling.kappa)
        if scaling.reverse:
            return Orders("O(κ² m)", features, "O(κ M₀^N)", log_kappa + n * log_m0)
        return Orders("O(κ^{2i} m)", features, "O(M₀ (κM₀)^{N−1})", log_m0 + (n - 1) * (log_kappa + log_m0))
    return Orders("O(m Σκ²)", features, "O(Σ κ_i M₀^i)", log_main_term(scaling, n, log_m0))


def log_sum_exp(terms: Sequence[float]) -> float:
    """log Σ exp(term) without overflow."""
    top = max(terms, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))


def _log(value: float) -> float:
    if not value >= 0:
        raise ScaleLongError(f"{value} is not a number of at least 0")
    return math.log(value) if value > 0 else -math.inf


def _exp(log_value: float) -> float:
    try:
        return math.exp(log_value)
    except OverflowError:
        return math.inf


def _check(coefficients: Sequence[float]) -> int:
    if not coefficients:
        raise ScaleLongError("there is no coefficient; a U-Net has at least one long skip")
    for i, kappa in enumerate(coefficients, start=1):
        if not (kappa >= 0 and math.isfinite(kappa)):
            raise ScaleLongError(f"coefficient κ_{i} is {kappa}; it must be a finite number of at least 0")
    return len(coefficients)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ScaleLongError(f"{name} is {value}; it must be between {low} and {high}")
