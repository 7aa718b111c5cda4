"""Formulas: the statements of the paper's Section 3, the closed forms of Sections 4.1 and 6, and the mean field.

Values that grow like M_0^N are computed as logarithms, so N, M_0 and m may be arbitrarily large; functions that return
the value itself return `inf` on overflow. Coefficients are κ_1 … κ_N, outermost first.
"""

import math
from collections.abc import Sequence

from scalelong.errors import invalid
from scalelong.kappa import log_geometric_sum, sum_of_squares
from scalelong.scaling import FixedScaling


def expected_input_norm(m: int, mean_alpha_bar: float) -> float:
    """Lemma 3.2: E‖x_t‖² = (1 − 2E_t ᾱ_t/3)m for x_0 uniform on [−1, 1], where E x_0² = 1/3."""
    return (1 - mean_alpha_bar * (1 - 1 / 3)) * m


def log_robustness(coefficients: Sequence[float], log_m0: float, log_l0: float = -math.inf) -> float:
    """Logarithm of Theorem 3.4's bound Σ_i κ_i M_0^i + c_0 with c_0 = M_0^N L_0 (Eq. 65).

    The bound is certified for M_0 = max ‖J_b‖‖J_a‖. The paper's M_0 = max ‖b_i∘a_i‖ is smaller, and Eq. 61 moves
    b_1∘a_1 past the inner gradient, which matrices do not allow: a network can violate the bound with that M_0.
    """
    if not coefficients:
        raise invalid("coefficients", "one number per long skip", coefficients)
    terms = [log_or_minus_inf(kappa) + i * log_m0 for i, kappa in enumerate(coefficients, start=1)]
    return log_sum_exp([*terms, len(coefficients) * log_m0 + log_l0])


def robustness(coefficients: Sequence[float], m0: float, l0: float = 0.0) -> float:
    """Theorem 3.4: the bound Σ_i κ_i M_0^i + M_0^N L_0 on ‖ΔUNet‖/‖δ‖; `inf` on overflow."""
    return exp_or_inf(log_robustness(coefficients, log_or_minus_inf(m0), log_or_minus_inf(l0)))


def log_main_term(scaling: FixedScaling, n: int, log_m0: float) -> float:
    """log Σ_i κ_i M_0^i, the main term of Theorem 3.4, in closed form if κ_i is geometric (Section 6's S and S_r).

    S = M_0(1 + κM_0 + … + (κM_0)^{N−1}) for CS, and S_r = κ^N M_0 (1 + M_0/κ + … + (M_0/κ)^{N−1}) for reversed CS.
    """
    geometric = scaling.geometric(n)
    if geometric is None:
        return log_robustness(scaling.coefficients(n), log_m0)
    log_first, log_ratio = geometric
    return log_first + log_m0 + log_geometric_sum(log_m0 + log_ratio, n)


def orders(scaling: FixedScaling, n: int) -> tuple[str, str]:
    """The orders that Sections 3, 4.1 and 6 print, of ‖h_0‖² (and of the gradient, times the loss) and of robustness.

    The robustness orders keep the largest main term, so they assume M_0 > 1 (and κM_0 > 1 for CS).
    """
    geometric = scaling.geometric(n)
    if geometric is None:
        return "O(m Σκ²)", "O(Σ κ_i M₀^i)"
    log_first, log_ratio = geometric
    if getattr(scaling, "reverse", False) and log_ratio:
        return "O(κ² m)", "O(κ M₀^N)"
    if log_ratio:  # CS
        return "O(κ^{2i} m)", "O(M₀ (κM₀)^{N−1})"
    return ("O(N m)", "O(N M₀^N)") if log_first == 0 else ("O(κ² N m)", "O(κ M₀^N)")  # standard, universal


# ------------------------------------------------------------------------------------------- mean field
# A block of l matrices multiplies the squared norm by its gain g in expectation: ReLU halves what N(0, 2/m) doubles,
# and no ReLU follows the last matrix, so g = 2 for Kaiming's N(0, 2/m) and g = 1 if the last matrix is N(0, 1/m).
# That last matrix has mean zero and is independent of everything before it, so the cross terms of ‖κ_i s_i + h_i‖²
# vanish in expectation, and for every width m exactly
#
#     E‖h_i‖² / ‖x‖² = Σ_{j=i+1}^N κ_j² g^{2j−i} + g^{2N−i+1}.
#
# The last term is the path through the middle block, which no κ scales. With g = 1 this is Theorem 3.1 with c_1 = 1
# and c_2 = ‖x_t‖². With g = 2 the path over skip j carries 4^j, and the middle path outweighs the rest.

BLOCK_GAIN = {"kaiming": 2.0, "norm-preserving": 1.0}


def log_feature_path_sum(coefficients: Sequence[float], i: int, init: str) -> float:
    """log E‖h_i‖²/‖x‖², exact for every width."""
    n, log_gain = len(coefficients), math.log(BLOCK_GAIN[init])
    skips = [2 * log_or_minus_inf(coefficients[j - 1]) + (2 * j - i) * log_gain for j in range(i + 1, n + 1)]
    return log_sum_exp([*skips, (2 * n - i + 1) * log_gain])


def gradient_path_sums(
    coefficients: Sequence[float], init: str, depth: int, noise_ratio: float = 1.0
) -> list[list[float]]:
    """‖∇_W ℓ‖²/(ℓ‖x‖²) of every matrix as m → ∞, for ℓ = ‖ε − UNet(x)‖² and ‖ε‖²/‖x‖² = noise_ratio.

    Rows are a_1 … a_N, f_N, b_1 … b_N, columns p = 1 … l.

    The gradient has rank one, ‖∇_W ℓ‖ = 2‖q‖·‖z‖ for W's input z and q = ½∂ℓ/∂(Wz). Backward through W, q becomes
    Wᵀq. Given u = Wz, W is u zᵀ/‖z‖² plus an independent part, so with c = ⟨u, q⟩ and variance v/m

        ‖Wᵀq‖² = c²/‖z‖² + v‖q‖²,

    and a ReLU before W keeps the first part, which is parallel to z, and halves the second. The proof of Theorem 3.3
    (Lemma B.11) has only the second part, as if q were independent of W. But ∂ℓ/∂UNet = 2(UNet − ε) contains the
    output: c is the share of ‖UNet‖² that passes through u, and each matrix adds c²/‖z‖².
    """
    n, gain = len(coefficients), BLOCK_GAIN[init]
    squares = [kappa * kappa for kappa in coefficients]
    variances = [2.0] * (depth - 1) + [gain]
    S = [gain**i for i in range(n + 1)]  # ‖s_i‖², with ‖x‖² = 1
    H, Z = [0.0] * n + [gain * S[n]], [0.0] * (n + 1)  # ‖h_i‖²; ‖z_i‖² of the joins z_i = κ_i s_i + h_i
    for i in range(n, 0, -1):
        Z[i] = squares[i - 1] * S[i] + H[i]
        H[i - 1] = gain * Z[i]
    loss = H[0] + noise_ratio

    def back_through(q_norm: float, c: float, z_norm: float) -> tuple[list[float], float]:
        """Return ‖∇_W ℓ‖²/ℓ of a block's matrices and ‖q‖² at its input; `q_norm` and `c` are in units of ℓ."""
        row = [0.0] * depth
        for p in range(depth - 1, -1, -1):
            row[p] = 4 * q_norm * z_norm  # ReLU and N(0, 2/m) keep ‖z‖² inside the block
            relu = 0.5 if p > 0 else 1.0
            q_norm = c * c * loss / z_norm + relu * variances[p] * q_norm
        return row, q_norm

    q_norm, c = 1.0, H[0] / loss
    decoders, joins = [], []  # joins: ‖q‖² and c at each join
    for i in range(1, n + 1):
        row, q_norm = back_through(q_norm, c, Z[i])
        decoders.append(row)
        joins.append((q_norm, c))
        c *= H[i] / Z[i]
    middle, q_norm = back_through(q_norm, c, S[n])
    encoders: list[list[float]] = []
    for i in range(n, 0, -1):  # at s_i the gradient over the skip adds to the one from inside
        join_norm, join_c = joins[i - 1]
        skip_c = join_c * squares[i - 1] * S[i] / Z[i]
        q_norm += squares[i - 1] * join_norm + 2 * skip_c * c * loss / S[i]
        c += skip_c
        row, q_norm = back_through(q_norm, c, S[i - 1])
        encoders.insert(0, row)
    return [*encoders, middle, *decoders]


def gradient_statement(coefficients: Sequence[float]) -> list[float]:
    """Theorem 3.3's Σ_{j≥i} κ_j² + 1 for each row of `gradient_path_sums`; i is N + 1 for the middle block."""
    totals = [sum_of_squares(coefficients, i) + 1 for i in range(1, len(coefficients) + 2)]
    return [*totals, *totals[:-1]]


def log_sum_exp(terms: Sequence[float]) -> float:
    """log Σ exp(term) without overflow."""
    top = max(terms, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))


def log_or_minus_inf(value: float) -> float:
    """log(value), and −inf for 0."""
    if not value >= 0:
        raise invalid("a norm or coefficient", "a number >= 0", value)
    return math.log(value) if value > 0 else -math.inf


def exp_or_inf(log_value: float) -> float:
    """exp(log_value), and inf on overflow."""
    try:
        return math.exp(log_value)
    except OverflowError:
        return math.inf
