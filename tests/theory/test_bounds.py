"""The paper's statements as functions: sums by hand, closed forms against plain sums, and the edges."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong import ConstantScaling, ExplicitScaling, NoScaling, ScaleLongError, UniformScaling
from scalelong.theory import bounds

numbers_of_skips = st.integers(1, 40)
kappas = st.floats(0.01, 1.0)
norms = st.floats(0.05, 20.0)


def scalings(kappa):
    return [NoScaling(), UniformScaling(kappa), ConstantScaling(kappa), ConstantScaling(kappa, reverse=True)]


# ------------------------------------------------------------------------------------------- statements


def test_theorem_3_1_by_hand():
    """N = 3, κ = (1, 1/2, 1/4), ‖x‖² = 8: h_1 sees κ_2² + κ_3² = 5/16."""
    found = bounds.feature_norm((1.0, 0.5, 0.25), i=1, x_norm_sq=8.0, rho=0.1, c1=2.0, c2=3.0)
    middle = 2 * 8 * 5 / 16 + 3
    assert (found.low, found.high) == pytest.approx((0.81 * middle, 1.21 * middle))
    assert middle in found
    assert 1.3 * middle not in found


def test_theorem_3_1_s_statement_sums_one_term_more_than_its_proof():
    kappas_ = (1.0, 0.5, 0.25)
    proof = bounds.feature_norm(kappas_, 1, 1.0, rho=1.0)
    printed = bounds.feature_norm(kappas_, 1, 1.0, rho=1.0, as_printed=True)
    assert proof.high == pytest.approx(4 * (0.25 + 0.0625))
    assert printed.high == pytest.approx(4 * (1 + 0.25 + 0.0625))
    # the output h_0 = f_0 is the same either way: there is no κ_0
    assert bounds.feature_norm(kappas_, 0, 1.0, 1.0) == bounds.feature_norm(kappas_, 0, 1.0, 1.0, as_printed=True)


def test_the_middle_block_s_feature_sees_no_skip():
    assert bounds.feature_norm((1.0, 1.0), i=2, x_norm_sq=5.0, rho=0.5, c2=7.0).high == pytest.approx(2.25 * 7)


def test_theorem_3_1_s_probability_rises_with_width_and_stays_in_0_1():
    values = [bounds.feature_probability(12, m, 0.5) for m in (1, 10, 100, 10**9)]
    assert values == sorted(values)
    assert values[0] == 0.0
    assert values[-1] == 1.0


def test_lemma_3_2_with_the_paper_s_mean_alpha_bar():
    assert bounds.expected_input_norm(3072, 0.27) == pytest.approx((1 - 2 * 0.27 / 3) * 3072)
    assert bounds.expected_input_norm(3072, 0.27, pixel_second_moment=1.0) == 3072


def test_theorem_3_3_by_hand():
    found = bounds.gradient_norm((1.0, 0.5, 0.25), i=2, loss=3.0, x_norm_sq=8.0, constant=4.0, c3=2.0)
    assert found == pytest.approx(4 * (3 * 8 * (0.25 + 0.0625) + 2))
    assert bounds.gradient_norm((1.0, 0.5, 0.25), i=4, loss=3.0, x_norm_sq=8.0, c3=2.0) == 2.0  # the middle block


def test_theorem_3_4_by_hand():
    """κ = (1, 1/2), M_0 = 3, L_0 = 2: 3 + 9/2 + 9·2."""
    assert bounds.robustness((1.0, 0.5), m0=3.0, l0=2.0, epsilon=0.1) == pytest.approx(0.1 * (3 + 4.5 + 18))


def test_theorem_3_4_with_one_norm_a_skip_is_no_larger_than_with_the_largest():
    coefficients, each = (1.0, 0.7, 0.4), (2.0, 5.0, 3.0)
    product = math.exp(bounds.log_robustness_product(coefficients, [math.log(v) for v in each], math.log(2)))
    assert product == pytest.approx(1 * 2 + 0.7 * 10 + 0.4 * 30 + 30 * 2)
    assert product < bounds.robustness(coefficients, max(each), 2.0)
    same = bounds.log_robustness_product(coefficients, [math.log(5)] * 3, 0.0)
    assert same == pytest.approx(bounds.log_robustness(coefficients, math.log(5), 0.0))


# ----------------------------------------------------------------------------------------- closed forms


@given(n=numbers_of_skips, kappa=kappas, data=st.data())
def test_closed_sums_of_squares_equal_the_plain_sums(n, kappa, data):
    start = data.draw(st.integers(1, n + 1))
    for scaling in scalings(kappa):
        plain = bounds.sum_of_squares(scaling.coefficients(n), start)
        assert bounds.closed_sum_of_squares(scaling, n, start) == pytest.approx(plain, rel=1e-9, abs=1e-300)


@given(n=numbers_of_skips, kappa=kappas, m0=norms)
def test_closed_main_terms_equal_the_plain_sums(n, kappa, m0):
    for scaling in scalings(kappa):
        plain = math.fsum(k * m0**i for i, k in enumerate(scaling.coefficients(n), start=1))
        assert math.exp(bounds.log_main_term(scaling, n, math.log(m0))) == pytest.approx(plain, rel=1e-9)
        assert bounds.robustness(scaling.coefficients(n), m0) == pytest.approx(plain, rel=1e-9)


def test_explicit_coefficients_have_the_plain_sums():
    scaling = ExplicitScaling((0.3, 0.0, 0.9))
    assert bounds.closed_sum_of_squares(scaling, 3) == pytest.approx(0.9)
    assert math.exp(bounds.log_main_term(scaling, 3, math.log(2))) == pytest.approx(0.6 + 0.9 * 8)
    assert bounds.orders(scaling, 3, 10, math.log(2)).feature_value == pytest.approx(9.0)


@given(ratio=st.fractions(Fraction(1, 100), 3, max_denominator=500), n=st.integers(1, 60))
def test_geometric_sum_equals_exact_rational_arithmetic(ratio, n):
    exact = sum(ratio**k for k in range(n))
    logarithm = math.log(exact.numerator) - math.log(exact.denominator)
    assert bounds.log_geometric_sum(math.log(ratio), n) == pytest.approx(logarithm, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("distance", [0.0, 1e-320, 1e-300, 1e-200, 1e-17, 1e-12, 1e-8])
@pytest.mark.parametrize("sign", [1, -1])
def test_geometric_sum_tends_to_n_at_ratio_one(distance, sign):
    assert math.exp(bounds.log_geometric_sum(sign * distance, 12)) == pytest.approx(12, rel=1e-6)


def test_geometric_sum_at_its_other_ends():
    assert bounds.log_geometric_sum(-math.inf, 5) == 0.0  # 1 + 0 + …
    assert bounds.log_geometric_sum(-1e6, 5) == 0.0
    assert bounds.log_geometric_sum(1.0, 0) == -math.inf
    assert bounds.log_geometric_sum(3.0, 1) == 0.0
    assert bounds.log_geometric_sum(700.0, 1000) == pytest.approx(999 * 700.0)


def test_section_4_1_says_cs_is_kappa_to_the_n_minus_2_below_the_universal_order():
    kappa, n, log_m0 = 0.7, 9, math.log(4.0)
    cs = bounds.orders(ConstantScaling(kappa), n, 100, log_m0)
    universal = bounds.orders(UniformScaling(kappa), n, 100, log_m0)
    assert math.exp(cs.log_robustness - universal.log_robustness) == pytest.approx(kappa ** (n - 2))


@pytest.mark.parametrize("n", [5, 10, 40])
def test_the_printed_orders_hold_up_to_a_constant_as_n_grows(n):
    """The largest term carries at least the share 1 − 1/r of a geometric sum of ratio r > 1."""
    kappa, m0 = 0.7, 4.0
    for scaling in scalings(kappa):
        ratio = (
            bounds.log_main_term(scaling, n, math.log(m0)) - bounds.orders(scaling, n, 1, math.log(m0)).log_robustness
        )
        assert ratio <= math.log(1 / (1 - 1 / (kappa * m0))) + 1e-9
        assert ratio >= (-math.log(n) if isinstance(scaling, NoScaling) else -1e-9)


def test_section_4_1_says_cs_compresses_h_i_to_kappa_to_the_2i():
    kappa, n = 0.6, 30
    for i in (1, 5, 10):
        found = bounds.closed_sum_of_squares(ConstantScaling(kappa), n, start=i + 1)
        assert found / kappa ** (2 * i) == pytest.approx(1 / (1 - kappa**2), rel=1e-3)


def test_section_6_says_reversed_cs_is_much_worse():
    n, log_m0 = 6, math.log(3.0)
    cs, reverse = ConstantScaling(0.7), ConstantScaling(0.7, reverse=True)
    assert bounds.log_main_term(reverse, n, log_m0) > bounds.log_main_term(cs, n, log_m0) + 1
    # and is the mirror image: M_0 → 1/M_0 turns one sum into the other
    mirrored = (n + 1) * log_m0 + bounds.log_main_term(cs, n, -log_m0) + math.log(0.7)
    assert bounds.log_main_term(reverse, n, log_m0) == pytest.approx(mirrored)


# ------------------------------------------------------------------------------------------------- edges


def test_one_skip_makes_cs_the_standard_network():
    assert bounds.closed_sum_of_squares(ConstantScaling(0.3), 1) == 1.0
    assert bounds.log_main_term(ConstantScaling(0.3), 1, math.log(5)) == pytest.approx(math.log(5))


def test_kappa_one_is_the_standard_network():
    for n in (1, 2, 17):
        assert bounds.closed_sum_of_squares(ConstantScaling(1.0), n) == pytest.approx(n)
        assert bounds.log_main_term(ConstantScaling(1.0), n, math.log(3)) == pytest.approx(
            bounds.log_main_term(NoScaling(), n, math.log(3))
        )


def test_kappa_near_zero_leaves_the_first_skip():
    assert bounds.closed_sum_of_squares(ConstantScaling(1e-300), 12) == 1.0
    assert bounds.closed_sum_of_squares(ConstantScaling(1e-300), 12, start=2) == 0.0
    assert bounds.robustness((0.0, 0.0), m0=4.0) == 0.0


def test_huge_widths_and_norms_stay_finite_in_logarithms():
    n, log_m0 = 10_000, 50.0
    logarithm = bounds.log_robustness(NoScaling().coefficients(n), log_m0, log_l0=3.0)
    assert logarithm == pytest.approx(n * log_m0 + 3.0, rel=1e-6)
    assert bounds.robustness((1.0,) * n, 1e20) == math.inf
    assert bounds.orders(NoScaling(), 12, 10**12, 0.0).feature_value == 12e12


@given(n=st.integers(2, 60), kappa=st.floats(0.05, 0.999))
def test_kappa_for_sum_inverts_the_sum(n, kappa):
    total = bounds.closed_sum_of_squares(ConstantScaling(kappa), n)
    found = bounds.kappa_for_sum(total, n)
    assert bounds.closed_sum_of_squares(ConstantScaling(found), n) == pytest.approx(total, rel=1e-12)
    assert found == pytest.approx(kappa, rel=1e-6)


def test_kappa_for_sum_outside_what_n_skips_can_give_is_the_nearer_end():
    assert bounds.kappa_for_sum(0.5, 6) == 0.0
    assert bounds.kappa_for_sum(1.0, 6) == 0.0
    assert bounds.kappa_for_sum(6.0, 6) == 1.0
    assert bounds.kappa_for_sum(math.inf, 6) == 1.0
    assert bounds.kappa_for_sum(1.0, 1) == 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: bounds.feature_norm((), 0, 1.0, 0.5),
        lambda: bounds.feature_norm((1.0,), 2, 1.0, 0.5),
        lambda: bounds.feature_norm((1.0,), 0, 1.0, 0.0),
        lambda: bounds.feature_norm((math.nan,), 0, 1.0, 0.5),
        lambda: bounds.gradient_norm((1.0,), 0, 1.0, 1.0),
        lambda: bounds.robustness((1.0,), m0=-1.0),
        lambda: bounds.robustness((1.0,), m0=math.nan),
        lambda: bounds.robustness((-1.0,), m0=1.0),
        lambda: bounds.expected_input_norm(10, 1.5),
        lambda: bounds.log_robustness_product((1.0,), (1.0, 2.0)),
        lambda: bounds.kappa_for_sum(math.nan, 3),
        lambda: bounds.kappa_for_sum(2.0, 0),
    ],
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(ScaleLongError):
        call()
