"""The network of Eq. 3: its formula, its two initializations, and where κ acts."""

import math

import numpy as np
import pytest
import torch

from scalelong import ConstantScaling, ExplicitScaling, NoScaling, ScaleLongError, UniformScaling, apply, remove
from scalelong.errors import InvalidValueError
from scalelong.theory.stacked import StackedUNet


def eq3_by_numpy(net: StackedUNet, x: np.ndarray, kappas: tuple[float, ...]) -> list[np.ndarray]:
    """h_0 … h_N by the recursion of Eq. 3, in numpy alone."""

    def stack(block, v):
        weights = [matrix.weight.detach().numpy() for matrix in block.matrices]
        for weight in weights[:-1]:
            v = np.maximum(weight @ v, 0)
        return weights[-1] @ v

    hidden: dict[int, np.ndarray] = {}

    def f(i, v):
        if i == net.num_skips:
            hidden[i] = stack(net.middle, v)
        else:
            inner = stack(net.encoders[i], v)
            hidden[i] = stack(net.decoders[i], kappas[i] * inner + f(i + 1, inner))
        return hidden[i]

    f(0, x)
    return [hidden[i] for i in range(net.num_skips + 1)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_skips", [1, 2, 5])
@pytest.mark.parametrize(
    "scaling",
    [None, NoScaling(), UniformScaling(0.5**0.5), ConstantScaling(0.7), ConstantScaling(0.7, reverse=True)],
    ids=str,
)
def test_features_equal_eq_3_in_numpy(depth, num_skips, scaling):
    net = StackedUNet(16, num_skips, depth, scaling=scaling, seed=3).double()
    x = torch.randn(16, dtype=torch.float64)
    kappas = (scaling or NoScaling()).coefficients(num_skips)
    features = net.features(x[None])
    for i, expected in enumerate(eq3_by_numpy(net, x.numpy(), kappas)):
        np.testing.assert_allclose(features.hidden[i][0].detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(net(x[None]), features.hidden[0])
    assert len(features.skips) == num_skips
    assert torch.equal(features.skips[0], net.encoders[0](x[None]))


def test_without_skips_it_is_the_feedforward_network():
    net = StackedUNet(8, 3, scaling=ExplicitScaling((0.0, 0.0, 0.0)))
    x = torch.randn(2, 8)
    plain = x
    for encoder in net.encoders:
        plain = encoder(plain)
    plain = net.middle(plain)
    for decoder in reversed(net.decoders):
        plain = decoder(plain, torch.zeros_like(plain))
    assert torch.allclose(net(x), plain, rtol=1e-6)


def test_scaling_can_be_applied_replaced_and_removed_later():
    net, x = StackedUNet(8, 3), torch.randn(2, 8)
    unscaled = net(x)
    apply(net, ConstantScaling(0.5))
    assert torch.equal(net(x), StackedUNet(8, 3, scaling=ConstantScaling(0.5))(x))
    assert not torch.equal(net(x), unscaled)
    remove(net)
    assert torch.equal(net(x), unscaled)


@pytest.mark.parametrize(("init", "gain"), [("kaiming", 2.0), ("norm-preserving", 1.0)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_block_multiplies_the_squared_norm_by_its_gain(init, gain, depth):
    """E‖a∘x‖² = g‖x‖². Relative variance of one block is about (5(l−1) + 2)/m."""
    width, net = 128, StackedUNet(128, 31, depth, init=init)
    x = torch.randn(width)
    with torch.no_grad():
        outputs = [a(x) for a in (*net.encoders, net.middle)] + [b(x, torch.zeros(width)) for b in net.decoders]
    gains = torch.stack(outputs).square().sum(1) / x.square().sum()
    error = math.sqrt((5 * (depth - 1) + 2) / width / len(gains))
    assert float(gains.mean()) == pytest.approx(gain, rel=4 * error)


def test_the_entries_have_the_stated_variances():
    kaiming = StackedUNet(200, 1, block_depth=3, init="kaiming")
    preserving = StackedUNet(200, 1, block_depth=3, init="norm-preserving")
    for matrix in kaiming.middle.matrices:
        assert float(matrix.weight.detach().var()) == pytest.approx(2 / 200, rel=0.05)
    variances = [float(matrix.weight.detach().var()) for matrix in preserving.middle.matrices]
    assert variances == pytest.approx([2 / 200, 2 / 200, 1 / 200], rel=0.05)


def test_both_initializations_draw_the_same_normal_numbers():
    kaiming, preserving = (StackedUNet(8, 2, init=init, seed=5) for init in ("kaiming", "norm-preserving"))
    for a, b in zip([*kaiming.encoders, kaiming.middle], [*preserving.encoders, preserving.middle], strict=True):
        assert torch.equal(a.matrices[0].weight, b.matrices[0].weight)
        assert torch.allclose(a.matrices[-1].weight, b.matrices[-1].weight * 2**0.5)


def test_the_seed_determines_the_weights_and_the_global_random_state_is_not_used():
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, second, other = StackedUNet(8, 2, seed=1), StackedUNet(8, 2, seed=1), StackedUNet(8, 2, seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_the_network_is_positively_homogeneous():
    net, x = StackedUNet(16, 4, scaling=ConstantScaling(0.8)), torch.randn(3, 16)
    assert torch.allclose(net(4.0 * x), 4.0 * net(x), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0, "num_skips": 2}, "width.*0"),
        ({"width": 8, "num_skips": 0}, "num_skips.*0"),
        ({"width": 8, "num_skips": 2, "block_depth": 0}, "block_depth.*0"),
        ({"width": 8, "num_skips": 2, "init": "kaimin"}, "did you mean 'kaiming'"),
        ({"width": 8, "num_skips": 2, "scaling": ExplicitScaling((1.0, 1.0, 1.0))}, "3 .* 2 long skips"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ScaleLongError, match=message):
        StackedUNet(**arguments)


def test_an_input_of_another_width_raises():
    with pytest.raises(InvalidValueError, match=r"8.*\(3, 9\)"):
        StackedUNet(8, 2)(torch.randn(3, 9))
