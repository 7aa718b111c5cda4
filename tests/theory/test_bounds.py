"""Formulas of Section 3: values by hand, closed forms against plain sums, and the mean field against networks."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelong import ConstantScaling, ExplicitScaling, NoScaling, UniformScaling
from scalelong.errors import InvalidValueError
from scalelong.kappa import cs_sum, kappa_for_sum, log_geometric_sum, sum_of_squares
from scalelong.process import get_process
from scalelong.theory import bounds
from scalelong.theory.bounds import gradient_path_sums, gradient_statement, log_feature_path_sum
from scalelong.theory.propagation import draw_inputs, measure_propagation
from scalelong.theory.stacked import StackedUNet

numbers_of_skips = st.integers(1, 40)
kappas = st.floats(0.01, 1.0)
norms = st.floats(0.05, 20.0)


def scalings(kappa):
    return [NoScaling(), UniformScaling(kappa), ConstantScaling(kappa), ConstantScaling(kappa, reverse=True)]


# ------------------------------------------------------------------------------------------- statements


def test_lemma_3_2_with_the_papers_mean_alpha_bar():
    assert bounds.expected_input_norm(3072, 0.27) == pytest.approx((1 - 2 * 0.27 / 3) * 3072)


def test_theorem_3_4_by_hand():
    """κ = (1, 1/2), M_0 = 3, L_0 = 2: 3 + 9/2 + 9·2."""
    assert bounds.robustness((1.0, 0.5), m0=3.0, l0=2.0) == pytest.approx(3 + 4.5 + 18)


# ----------------------------------------------------------------------------------------- closed forms


@given(n=numbers_of_skips, kappa=kappas)
def test_the_closed_sum_of_squares_of_cs_equals_the_plain_sum(n, kappa):
    assert cs_sum(kappa, n) == pytest.approx(sum_of_squares(ConstantScaling(kappa).coefficients(n)), rel=1e-9)


@given(n=numbers_of_skips, kappa=kappas, m0=norms)
def test_closed_main_terms_equal_the_plain_sums(n, kappa, m0):
    for scaling in scalings(kappa):
        plain = math.fsum(k * m0**i for i, k in enumerate(scaling.coefficients(n), start=1))
        assert math.exp(bounds.log_main_term(scaling, n, math.log(m0))) == pytest.approx(plain, rel=1e-9)
        assert bounds.robustness(scaling.coefficients(n), m0) == pytest.approx(plain, rel=1e-9)


def test_explicit_coefficients_have_the_plain_sums():
    scaling = ExplicitScaling((0.3, 0.0, 0.9))
    assert sum_of_squares(scaling.coefficients(3)) == pytest.approx(0.9)
    assert math.exp(bounds.log_main_term(scaling, 3, math.log(2))) == pytest.approx(0.6 + 0.9 * 8)


@given(ratio=st.fractions(Fraction(1, 100), 3, max_denominator=500), n=st.integers(1, 60))
def test_geometric_sum_equals_exact_rational_arithmetic(ratio, n):
    exact = sum(ratio**k for k in range(n))
    logarithm = math.log(exact.numerator) - math.log(exact.denominator)
    assert log_geometric_sum(math.log(ratio), n) == pytest.approx(logarithm, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("distance", [0.0, 1e-320, 1e-300, 1e-200, 1e-17, 1e-12, 1e-8])
@pytest.mark.parametrize("sign", [1, -1])
def test_geometric_sum_tends_to_n_at_ratio_one(distance, sign):
    assert math.exp(log_geometric_sum(sign * distance, 12)) == pytest.approx(12, rel=1e-6)


def test_geometric_sum_at_its_limits():
    assert log_geometric_sum(-math.inf, 5) == 0.0  # 1 + 0 + …
    assert log_geometric_sum(-1e6, 5) == 0.0
    assert log_geometric_sum(1.0, 0) == -math.inf
    assert log_geometric_sum(3.0, 1) == 0.0
    assert log_geometric_sum(700.0, 1000) == pytest.approx(999 * 700.0)


@pytest.mark.parametrize("n", [5, 10, 40])
def test_the_printed_orders_hold_up_to_a_constant_as_n_grows(n):
    """The largest term of a geometric sum of ratio r > 1 is at least the share 1 − 1/r."""
    kappa, m0 = 0.7, 4.0
    printed = {
        "O(N M₀^N)": n * m0**n,
        "O(κ M₀^N)": kappa * m0**n,
        "O(M₀ (κM₀)^{N−1})": m0 * (kappa * m0) ** (n - 1),
    }
    for scaling in scalings(kappa):
        _, order = bounds.orders(scaling, n)
        ratio = bounds.log_main_term(scaling, n, math.log(m0)) - math.log(printed[order])
        assert ratio <= math.log(1 / (1 - 1 / (kappa * m0))) + 1e-9
        assert ratio >= (-math.log(n) if scaling.is_identity else -1e-9)


def test_the_printed_feature_orders_name_their_scaling():
    explicit = ExplicitScaling((0.3, 0.0, 0.9, 1.0, 1.0))
    features = [bounds.orders(scaling, 5)[0] for scaling in (*scalings(0.7), explicit)]
    assert features == ["O(N m)", "O(κ² N m)", "O(κ^{2i} m)", "O(κ² m)", "O(m Σκ²)"]


def test_section_4_1_cs_compresses_h_i_like_kappa_to_the_2i():
    kappa, n = 0.6, 30
    for i in (1, 5, 10):
        total = sum_of_squares(ConstantScaling(kappa).coefficients(n), start=i + 1)
        assert total / kappa ** (2 * i) == pytest.approx(1 / (1 - kappa**2), rel=1e-3)


def test_section_6_reversed_cs_is_much_less_robust():
    n, log_m0 = 6, math.log(3.0)
    cs, reverse = ConstantScaling(0.7), ConstantScaling(0.7, reverse=True)
    assert bounds.log_main_term(reverse, n, log_m0) > bounds.log_main_term(cs, n, log_m0) + 1
    # Mirror image: M_0 → 1/M_0 turns one sum into the other.
    mirrored = (n + 1) * log_m0 + bounds.log_main_term(cs, n, -log_m0) + math.log(0.7)
    assert bounds.log_main_term(reverse, n, log_m0) == pytest.approx(mirrored)


# ------------------------------------------------------------------------------------------------ limits


def test_cs_on_one_skip_is_the_standard_network():
    assert cs_sum(0.3, 1) == 1.0
    assert bounds.log_main_term(ConstantScaling(0.3), 1, math.log(5)) == pytest.approx(math.log(5))


def test_kappa_one_is_the_standard_network():
    for n in (1, 2, 17):
        assert cs_sum(1.0, n) == pytest.approx(n)
        assert bounds.log_main_term(ConstantScaling(1.0), n, math.log(3)) == pytest.approx(
            bounds.log_main_term(NoScaling(), n, math.log(3))
        )


def test_kappa_near_zero_keeps_only_the_first_skip():
    assert cs_sum(1e-300, 12) == 1.0
    assert bounds.robustness((0.0, 0.0), m0=4.0) == 0.0


def test_logarithms_stay_finite_for_huge_widths_and_norms():
    n, log_m0 = 10_000, 50.0
    logarithm = bounds.log_robustness(NoScaling().coefficients(n), log_m0, log_l0=3.0)
    assert logarithm == pytest.approx(n * log_m0 + 3.0, rel=1e-6)
    assert bounds.robustness((1.0,) * n, 1e20) == math.inf


@given(n=st.integers(2, 60), kappa=st.floats(0.05, 0.999))
def test_kappa_for_sum_inverts_the_sum(n, kappa):
    total = cs_sum(kappa, n)
    solution = kappa_for_sum(total, n)
    assert cs_sum(solution, n) == pytest.approx(total, rel=1e-12)
    assert solution == pytest.approx(kappa, rel=1e-6)


def test_kappa_for_sum_clamps_to_the_range_of_n_skips():
    assert kappa_for_sum(0.5, 6) == 0.0
    assert kappa_for_sum(1.0, 6) == 0.0
    assert kappa_for_sum(6.0, 6) == 1.0
    assert kappa_for_sum(math.inf, 6) == 1.0
    assert kappa_for_sum(1.0, 1) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.robustness((), m0=1.0),
        lambda: bounds.robustness((math.nan,), m0=1.0),
        lambda: bounds.robustness((1.0,), m0=-1.0),
        lambda: bounds.robustness((1.0,), m0=math.nan),
        lambda: bounds.robustness((-1.0,), m0=1.0),
    ],
)
def test_invalid_arguments_raise(call):
    with pytest.raises(InvalidValueError, match="got"):
        call()


# ------------------------------------------------------------------------------------------- mean field


def path_sum(kappas, i, init):
    return math.exp(log_feature_path_sum(kappas, i, init))


def test_kaimings_path_sums_by_hand():
    """N = 2, κ = (1, 1/2): skip 1 carries 4, skip 2 carries 16, the middle 2·16."""
    assert path_sum((1.0, 0.5), 0, "kaiming") == pytest.approx(4 + 16 / 4 + 32)
    assert path_sum((1.0, 0.5), 1, "kaiming") == pytest.approx((16 / 4 + 32) / 2)
    assert path_sum((1.0, 0.5), 2, "kaiming") == pytest.approx(8)  # f_N: two encoders and itself


def test_with_six_skips_the_middle_path_dominates():
    """Σ4^j + 2·4^6: DESIGN's networks measured 12,310 unscaled, 6,910 with CS 0.7 and 6,393 with every skip cut."""
    assert path_sum((1.0,) * 6, 0, "kaiming") == pytest.approx(13_652)
    assert path_sum((0.0,) * 6, 0, "kaiming") == pytest.approx(8_192)
    assert path_sum(ConstantScaling(0.7).coefficients(6), 0, "kaiming") == pytest.approx(8_424, rel=1e-4)


def test_the_norm_preserving_path_sum_is_theorem_3_1_with_c1_and_c2_one():
    kappas = ConstantScaling(0.7).coefficients(5)
    for i in range(6):
        assert path_sum(kappas, i, "norm-preserving") == pytest.approx(sum_of_squares(kappas, i + 1) + 1)


def test_path_sums_of_a_thousand_skips_do_not_overflow():
    assert log_feature_path_sum((1.0,) * 1000, 0, "kaiming") == pytest.approx(
        1000 * math.log(4) + math.log(2 + 4 / 3), rel=1e-9
    )


def test_gradients_when_the_noise_outweighs_the_output():
    """When ε outweighs the output, q is independent of the weights: 4·Σ_{j≥i} κ_j² + 4, halved before a ReLU."""
    kappas = (1.0, 0.5, 0.25)
    rows = gradient_path_sums(kappas, "norm-preserving", depth=3, noise_ratio=1e12)
    assert len(rows) == 7
    for total, row in zip(gradient_statement(kappas), rows, strict=True):
        assert row == pytest.approx([2 * total, 2 * total, 4 * total], rel=1e-6)


def test_gradients_of_one_matrix_by_hand():
    """N = 1, l = 1, κ = 0: UNet = b f a x with Gaussian matrices of variance 1/m, no noise.

    ℓ = ‖UNet‖² = 1, ∂ℓ/∂UNet = 2 UNet, and each matrix of the backward pass adds 1 to ‖q‖²: 4·1, 4·2, 4·3.
    """
    rows = gradient_path_sums((0.0,), "norm-preserving", depth=1, noise_ratio=0.0)
    assert rows == [pytest.approx([12.0]), pytest.approx([8.0]), pytest.approx([4.0])]  # a_1, f, b_1


@pytest.mark.parametrize("init", ["kaiming", "norm-preserving"])
@pytest.mark.parametrize("scaling", [NoScaling(), ConstantScaling(0.6), ExplicitScaling((0.0, 0.0, 0.0))], ids=str)
def test_measured_features_and_gradients_agree_with_the_mean_field(init, scaling):
    """30 networks of width 256 with 8 inputs each, N = 3, l = 2: within four standard errors and 1/m corrections."""
    width, n, depth, seeds = 256, 3, 2, 30
    kappas = scaling.coefficients(n)
    alpha_bar = get_process("ddpm").alpha_bar(torch.arange(1, 1001))
    features, gradients, ratios = [], [], []
    for seed in range(seeds):
        net, (x_t, eps) = StackedUNet(width, n, depth, scaling, init, seed), draw_inputs(8, width, alpha_bar, seed)
        measured = measure_propagation(net, x_t, eps)
        features.append(measured.features.mean(0))
        gradients.append(measured.gradients.mean(0))
        ratios.append(float((eps.square().sum(1) / x_t.square().sum(1)).mean()))
    features, gradients = torch.stack(features), torch.stack(gradients)

    predicted = torch.tensor([path_sum(kappas, i, init) for i in range(n + 1)])
    error = features.std(0) / math.sqrt(seeds)
    assert ((features.mean(0) - predicted).abs() < 4 * error).all()

    predicted = torch.tensor(gradient_path_sums(kappas, init, depth, sum(ratios) / seeds))
    error = gradients.std(0) / math.sqrt(seeds)
    assert ((gradients.mean(0) - predicted).abs() < 4 * error + 0.1 * predicted).all()


@pytest.mark.filterwarnings("ignore:kappa = 1.3 is greater than 1")
def test_orders_follow_the_direction_of_cs_also_above_one():
    for kappa in (0.7, 1.3):
        assert bounds.orders(ConstantScaling(kappa), 6)[0] == "O(κ^{2i} m)"
        assert bounds.orders(ConstantScaling(kappa, reverse=True), 6)[0] == "O(κ² m)"
