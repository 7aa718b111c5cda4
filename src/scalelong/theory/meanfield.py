"""What the network of Eq. 3 does on average: the path sums with their true gains.

A block of l matrices multiplies the squared norm by its gain g in expectation: ReLU halves what N(0, 2/m)
doubles, and no ReLU follows the last matrix, so g = 2 for Kaiming's N(0, 2/m) and g = 1 when the last matrix is
N(0, 1/m). That last matrix has mean zero and is independent of all before it, so the cross terms of
‖κ_i s_i + h_i‖² vanish in expectation too, and for every width m exactly

    E‖h_i‖² / ‖x‖² = Σ_{j=i+1}^N κ_j² g^{2j−i} + g^{2N−i+1}.

The last term is the path through the middle block, which no κ touches. With g = 1 this is Theorem 3.1 with
c_1 = 1 and c_2 = ‖x_t‖²; with g = 2 the path over skip j carries 4^j and the middle path outweighs the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalelong.theory.bounds import log_sum_exp

BLOCK_GAIN = {"kaiming": 2.0, "norm-preserving": 1.0}


def log_feature_path_sum(coefficients: Sequence[float], i: int, init: str) -> float:
    """log E‖h_i‖²/‖x‖², exact for every width."""
    n, log_gain = len(coefficients), math.log(BLOCK_GAIN[init])
    skips = [
        2 * math.log(coefficients[j - 1]) + (2 * j - i) * log_gain
        for j in range(i + 1, n + 1)
        if coefficients[j - 1] > 0
    ]
    return log_sum_exp([*skips, (2 * n - i + 1) * log_gain])


def gradient_path_sums(
    coefficients: Sequence[float], init: str, depth: int, noise_ratio: float = 1.0
) -> list[list[float]]:
    """‖∇_W ℓ‖²/(ℓ‖x‖²) of every matrix as m → ∞, for ℓ = ‖ε − UNet(x)‖² and ‖ε‖²/‖x‖² = noise_ratio.

    Rows a_1 … a_N, f_N, b_1 … b_N, columns p = 1 … l.

    The gradient is rank one, ‖∇_W ℓ‖ = 2‖q‖·‖z‖ for W's input z and q = ½∂ℓ/∂(Wz). Going back through W, q
    becomes Wᵀq. Given u = Wz, W is u zᵀ/‖z‖² plus an independent part, so with c = ⟨u, q⟩ and variance v/m

        ‖Wᵀq‖² = c²/‖z‖² + v‖q‖²,

    and a ReLU before W keeps the first part, which lies along z, and halves the second. The proof of Theorem 3.3
    (Lemma B.11) has the second part alone, as if q were independent of W. But ∂ℓ/∂UNet = 2(UNet − ε) contains
    the output: c is the share of ‖UNet‖² that passes through u, and each matrix adds c²/‖z‖².
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
    rows: dict[str, list[float]] = {}

    def back_through(block: str, q_norm: float, c: float, z_norm: float) -> float:
        """Note ‖∇_W ℓ‖²/ℓ of the block's matrices and give ‖q‖² at its input; `q_norm` and `c` are in units of ℓ."""
        row = rows[block] = [0.0] * depth
        for p in range(depth - 1, -1, -1):
            row[p] = 4 * q_norm * z_norm  # ReLU and N(0, 2/m) keep ‖z‖² inside the block
            relu = 0.5 if p > 0 else 1.0
            q_norm = c * c * loss / z_norm + relu * variances[p] * q_norm
        return q_norm

    q_norm, c = 1.0, H[0] / loss
    joins: list[tuple[float, float]] = []  # ‖q‖² and c at each join
    for i in range(1, n + 1):
        q_norm = back_through(f"b{i}", q_norm, c, Z[i])
        joins.append((q_norm, c))
        c *= H[i] / Z[i]
    q_norm = back_through("f", q_norm, c, S[n])
    for i in range(n, 0, -1):  # at s_i the gradient over the skip meets the one from inside
        join_norm, join_c = joins[i - 1]
        skip_c = join_c * squares[i - 1] * S[i] / Z[i]
        q_norm += squares[i - 1] * join_norm + 2 * skip_c * c * loss / S[i]
        c += skip_c
        q_norm = back_through(f"a{i}", q_norm, c, S[i - 1])
    names = [f"a{i}" for i in range(1, n + 1)] + ["f"] + [f"b{i}" for i in range(1, n + 1)]
    return [rows[name] for name in names]
