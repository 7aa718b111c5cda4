"""Power iteration on Jacobian–vector products against the singular values of whole Jacobians."""

import math

import pytest
import torch
from dense import dense_jacobian
from torch import nn

from scalelong.errors import InvalidValueError
from scalelong.robustness.lipschitz import spectral_norm
from scalelong.theory.stacked import StackedUNet


def test_the_norm_of_a_matrix_is_its_largest_singular_value():
    matrix = torch.randn(30, 20, dtype=torch.float64)
    result = spectral_norm(lambda x: matrix @ x, torch.zeros(20, dtype=torch.float64), 2000, 1e-12)
    assert result.converged
    assert result.value == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-6)


def test_inference_mode_changes_nothing():
    with torch.inference_mode():
        found = spectral_norm(lambda v: 2 * v, torch.ones(3))
    assert found.value == pytest.approx(2)


@pytest.mark.parametrize("network", ["convolution", "stacked", "attention"])
def test_the_norm_of_a_network_equals_that_of_its_whole_jacobian(network):
    torch.manual_seed(0)
    if network == "convolution":
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 3, 3, stride=2))
        x = torch.randn(1, 2, 7, 7)
    elif network == "stacked":
        net, x = StackedUNet(16, 3), torch.randn(1, 16)
    else:
        net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        x = torch.randn(1, 5, 8)
    net, x = net.double().requires_grad_(False), x.double()
    whole = dense_jacobian(net, x)
    assert whole.shape == (net(x).numel(), x.numel())
    result = spectral_norm(net, x, iterations=5000, tolerance=1e-12)
    assert result.value == pytest.approx(float(torch.linalg.matrix_norm(whole, 2)), rel=1e-5)


def test_few_iterations_give_a_lower_bound_and_do_not_claim_convergence():
    matrix = torch.randn(50, 50, dtype=torch.float64)
    true = float(torch.linalg.matrix_norm(matrix, 2))
    values = [spectral_norm(lambda x: matrix @ x, torch.zeros(50, dtype=torch.float64), k, 0.0) for k in (1, 3, 10)]
    assert [one.converged for one in values] == [False] * 3
    assert values[0].value < values[1].value < values[2].value <= true


def test_no_small_step_is_amplified_by_more_than_the_norm():
    net = StackedUNet(16, 2).double().requires_grad_(False)
    x = torch.randn(1, 16, dtype=torch.float64)
    norm = spectral_norm(net, x, 5000, 1e-12).value
    steps = 1e-7 * torch.nn.functional.normalize(torch.randn(200, 16, dtype=torch.float64))
    stretches = (net(x + steps) - net(x)).norm(dim=1) / 1e-7
    assert float(stretches.max()) <= norm * (1 + 1e-5)
    assert float(stretches.max()) > 0.3 * norm


def test_a_constant_function_has_norm_zero():
    result = spectral_norm(lambda x: x * 0, torch.randn(4))
    assert (result.value, result.converged) == (0.0, True)


def test_power_iteration_stops_at_nan():
    result = spectral_norm(lambda v: v * math.nan, torch.ones(3))
    assert not result.converged
    assert math.isnan(result.value)


def test_zero_iterations_raise():
    with pytest.raises(InvalidValueError, match="iterations.*0"):
        spectral_norm(lambda x: x, torch.ones(3), iterations=0)
