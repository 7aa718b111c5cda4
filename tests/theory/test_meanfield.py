"""The path sums with their true gains: by hand, in their limits, and against networks that were run."""

import math

import pytest
import torch

from scalelong import ConstantScaling, ExplicitScaling, NoScaling
from scalelong.process import get_process
from scalelong.theory.bounds import sum_of_squares
from scalelong.theory.meanfield import gradient_path_sums, log_feature_path_sum
from scalelong.theory.propagation import draw_inputs, gradient_index, measure_propagation, scaled
from scalelong.theory.stacked import StackedUNet


def path_sum(kappas, i, init):
    return math.exp(log_feature_path_sum(kappas, i, init))


def test_kaiming_s_path_sums_by_hand():
    """N = 2, κ = (1, 1/2): skip 1 carries 4, skip 2 carries 16, the middle 2·16."""
    assert path_sum((1.0, 0.5), 0, "kaiming") == pytest.approx(4 + 16 / 4 + 32)
    assert path_sum((1.0, 0.5), 1, "kaiming") == pytest.approx((16 / 4 + 32) / 2)
    assert path_sum((1.0, 0.5), 2, "kaiming") == pytest.approx(8)  # f_N: two encoders and itself


def test_six_skips_give_the_middle_path_the_upper_hand():
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


def test_gradients_of_a_network_that_outputs_nothing_to_speak_of():
    """When ε outweighs the output, q is independent of the weights: 4·Σ_{j≥i} κ_j² + 4, halved before a ReLU."""
    kappas = (1.0, 0.5, 0.25)
    rows = gradient_path_sums(kappas, "norm-preserving", depth=3, noise_ratio=1e12)
    assert len(rows) == 7
    for k, row in enumerate(rows):
        full = 4 * (sum_of_squares(kappas, gradient_index(k, 3)) + 1)
        assert row == pytest.approx([full / 2, full / 2, full], rel=1e-6)


def test_gradients_of_one_matrix_by_hand():
    """N = 1, l = 1, κ = 0: UNet = b f a x with Gaussian matrices of variance 1/m, no noise.

    ℓ = ‖UNet‖² = 1, ∂ℓ/∂UNet = 2 UNet, and each matrix on the way back adds 1 to ‖q‖²: 4·1, 4·2, 4·3.
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
        net, noisy = StackedUNet(width, n, depth, init=init, seed=seed), draw_inputs(8, width, alpha_bar, seed)
        with scaled(net, scaling):
            found = measure_propagation(net, noisy.x_t, noisy.eps)
        features.append(found.features.mean(0))
        gradients.append(found.gradients.mean(0))
        ratios.append(float((noisy.eps.square().sum(1) / noisy.x_t.square().sum(1)).mean()))
    features, gradients = torch.stack(features), torch.stack(gradients)

    predicted = torch.tensor([path_sum(kappas, i, init) for i in range(n + 1)])
    error = features.std(0) / math.sqrt(seeds)
    assert ((features.mean(0) - predicted).abs() < 4 * error).all()

    predicted = torch.tensor(gradient_path_sums(kappas, init, depth, sum(ratios) / seeds))
    error = gradients.std(0) / math.sqrt(seeds)
    assert ((gradients.mean(0) - predicted).abs() < 4 * error + 0.1 * predicted).all()
