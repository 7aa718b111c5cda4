"""Measured features and gradients against autograd; predictions compared with measurements."""

import math

import pytest
import torch

from scalelong import ConstantScaling, NoScaling
from scalelong.theory.bounds import expected_input_norm, gradient_statement, log_feature_path_sum
from scalelong.theory.propagation import Shape, draw_inputs, measure_propagation, sample_networks
from scalelong.theory.stacked import StackedUNet


@pytest.mark.parametrize("depth", [1, 3])
def test_gradients_equal_autograds_for_every_matrix_and_sample(depth):
    net = StackedUNet(12, 3, depth, scaling=ConstantScaling(0.7)).double()
    x, eps = torch.randn(4, 12, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64)
    measured = measure_propagation(net, x, eps)
    assert measured.gradients.shape == (4, 7, depth)
    for sample in range(4):
        loss = (eps[sample] - net(x[sample : sample + 1])).square().sum()
        net.zero_grad()
        loss.backward()
        for row, block in enumerate(net.blocks):
            for column, matrix in enumerate(block.matrices):
                expected = matrix.weight.grad.square().sum() / (loss.detach() * x[sample].square().sum())
                assert float(measured.gradients[sample, row, column]) == pytest.approx(float(expected), rel=1e-9)


def test_features_are_the_squared_norms_of_every_h_i():
    net, x = StackedUNet(12, 3), torch.randn(4, 12)
    measured = measure_propagation(net, x, torch.zeros(4, 12))
    for i, hidden in enumerate(net.features(x).hidden):
        expected = hidden.detach().square().sum(1) / x.square().sum(1)
        assert torch.allclose(measured.features[:, i].float(), expected, rtol=1e-5)


@pytest.mark.parametrize("skips", [16, 40, 128])
def test_many_skips_do_not_overflow(skips):
    """With Kaiming's gain a gradient's squared norm passes float32's range at about 26 skips."""
    (samples,) = sample_networks("kaiming", Shape(64, skips, 1), {"standard": NoScaling()}, seeds=1).values()
    assert samples.features.isfinite().all()
    assert samples.gradients.isfinite().all()
    expected = math.exp(log_feature_path_sum((1.0,) * skips, 0, "kaiming"))
    # One narrow network: the spread of log ‖h_0‖² is about √(2(2N + 1)/m), 3 for 128 skips.
    assert abs(math.log(samples.features[..., 0].mean().item() / expected)) < 3 * math.sqrt(2 * (2 * skips + 1) / 64)


def test_squared_norms_are_double():
    net, x = StackedUNet(256, 26), torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    assert measure_propagation(net, x, torch.zeros_like(x)).gradients.isfinite().all()


def test_measuring_leaves_no_hook_and_no_gradient():
    net = StackedUNet(12, 2)
    measure_propagation(net, torch.randn(1, 12), torch.randn(1, 12))
    assert all(not module._forward_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_rows_of_gradients_belong_to_the_right_blocks():
    shape = Shape(width=8, skips=2, depth=2)
    assert gradient_statement((1.0, 0.5)) == [2.25, 1.25, 1.0, 2.25, 1.25]
    names = [shape.matrix_name(row, 0) for row in range(5)]
    assert names == ["a_1 W_1", "a_2 W_1", "f_2 W_1", "b_1 W_1", "b_2 W_1"]
    net = shape.build("kaiming", seed=0)
    assert [id(block) for block in net.blocks] == [id(b) for b in (*net.encoders, net.middle, *net.decoders)]


def test_inputs_are_uniform_pixels_with_noise():
    noisy, _ = draw_inputs(20_000, 64, torch.tensor([1.0, 0.5, 0.0]), seed=0)
    measured = noisy.square().mean(1)
    error = float(measured.std() / 20_000**0.5)
    assert float(measured.mean()) == pytest.approx(expected_input_norm(1, 0.5), abs=4 * error)
    clean, _ = draw_inputs(500, 64, torch.ones(1), seed=0)
    assert float(clean.abs().max()) <= 1
    assert float(clean.square().mean()) == pytest.approx(1 / 3, rel=0.02)
    assert torch.equal(*draw_inputs(10, 64, torch.zeros(1), seed=0))
