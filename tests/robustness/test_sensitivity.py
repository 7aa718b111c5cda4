"""Sensitivity to extra noise against closed forms of linear networks."""

import math

import pytest
import torch

from scalelong.diffusion import simple_loss
from scalelong.errors import InvalidValueError
from scalelong.process import get_process
from scalelong.robustness import measure_sensitivity

VP = get_process("vp")
EDGES = (0.0, 0.5, 1.0)


def matrix(m, seed=0):
    return torch.randn(m, m, generator=torch.Generator().manual_seed(seed)) / m**0.5


def linear(A):
    return lambda x, t, **kw: (x.flatten(1) @ A.T).view_as(x)


def data(n=64, side=4, seed=1):
    g = torch.Generator().manual_seed(seed)
    x_0, eps = (torch.randn(n, 1, side, side, generator=g) for _ in range(2))
    return x_0, torch.linspace(0.01, 0.99, n), eps


def test_a_linear_network_amplifies_noise_by_its_frobenius_norm():
    """E‖Aδ‖²/m = σ²‖A‖_F²/m, and the loss grows by the same amount, because δ is independent of everything else."""
    A = matrix(16)
    rows = measure_sensitivity(linear(A), VP, *data(512), variances=(0.0, 0.1, 0.4), edges=EDGES, draws=8)
    share = float(A.square().sum()) / 16
    assert rows[0].overall.change == 0.0
    assert math.isnan(rows[0].overall.gain)
    for row in rows[1:]:
        assert row.overall.change == pytest.approx(row.variance * share, rel=0.03)
        assert row.overall.gain == pytest.approx(math.sqrt(share), rel=0.02)
        grown = row.overall.loss - rows[0].overall.loss
        assert grown == pytest.approx(row.variance * share, rel=0.15)


def test_every_variance_uses_the_same_directions():
    """The change of a linear network is then exactly proportional to the variance."""
    rows = measure_sensitivity(linear(matrix(16)), VP, *data(), variances=(0.1, 0.4), edges=EDGES, draws=2)
    assert rows[1].overall.change == pytest.approx(4 * rows[0].overall.change, rel=1e-4)
    assert rows[1].overall.gain == pytest.approx(rows[0].overall.gain, rel=1e-4)


def test_results_are_separated_by_timestep():
    """A network that uses its input only at late times changes only there."""
    late = lambda x, t, **kw: torch.where((t >= 500).view(-1, 1, 1, 1), 2 * x, torch.zeros_like(x))
    (row,) = measure_sensitivity(late, VP, *data(), variances=(0.2,), edges=EDGES)
    early, later = row.by_time
    assert early.change == 0.0
    assert later.gain == pytest.approx(2.0, rel=1e-5)
    assert early.samples + later.samples == row.overall.samples == 64
    assert row.overall.change == pytest.approx((early.change * early.samples + later.change * later.samples) / 64)


def test_without_noise_the_loss_is_the_training_loss():
    A, (x_0, t, eps) = matrix(16), data()
    (row,) = measure_sensitivity(linear(A), VP, x_0, t, eps, variances=(0.0,), edges=EDGES)
    assert row.overall.loss == pytest.approx(simple_loss(linear(A), VP, x_0, t, eps).mean().item(), rel=1e-6)


def test_a_bin_without_samples_is_none_and_conditions_are_passed():
    labels = []
    net = lambda x, t, y: labels.append(y) or x
    x_0, t, eps = data(8)
    rows = measure_sensitivity(net, VP, x_0, t * 0.4, eps, {"y": torch.arange(8)}, variances=(0.1,), edges=EDGES,
                               batch_size=3)  # fmt: skip
    assert rows[0].by_time[1] is None
    assert torch.cat(labels[:1]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"), [({"variances": (-1.0,)}, "-1"), ({"variances": (0.1,), "draws": 0}, "draws")]
)
def test_invalid_noise_settings_raise(options, message):
    with pytest.raises(InvalidValueError, match=message):
        measure_sensitivity(linear(matrix(16)), VP, *data(), edges=EDGES, **options)


def test_no_samples_raise():
    with pytest.raises(InvalidValueError, match="x_0"):
        measure_sensitivity(linear(matrix(16)), VP, *data(0), variances=(0.1,), edges=EDGES)
