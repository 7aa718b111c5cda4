"""Theorem 3.4 on the network of Eq. 3: Jacobians against autograd; the certified bound always holds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong import ConstantScaling, ExplicitScaling, NoScaling, UniformScaling, apply
from scalelong.errors import InvalidValueError, UnsupportedNetworkError
from scalelong.scaling import LearnableScaling
from scalelong.theory.bounds import log_robustness, robustness
from scalelong.theory.lipschitz import (
    coefficients_of,
    counterexample,
    global_log_norms,
    measure_robustness,
    stack_jacobian,
)
from scalelong.theory.stacked import StackedUNet


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def test_jacobians_equal_autograds():
    net = StackedUNet(10, 3, 2, scaling=ConstantScaling(0.7)).double()
    x = torch.randn(10, dtype=torch.float64)
    local = measure_robustness(net, x)
    assert local.network == pytest.approx(norm(torch.func.jacrev(net)(x)), rel=1e-9)
    features = net.features(x)
    for i in range(3):
        source = x if i == 0 else features.skips[i - 1]
        join = local.coefficients[i] * features.skips[i] + features.hidden[i + 1]
        J_a = torch.func.jacrev(net.encoders[i])(source)
        J_b = torch.func.jacrev(lambda z, b=net.decoders[i]: super(type(b), b).forward(z))(join)
        assert torch.allclose(J_a, stack_jacobian(net.encoders[i], source))
        assert local.separate[i] == pytest.approx(norm(J_b) * norm(J_a), rel=1e-9)
        assert local.composed[i] == pytest.approx(norm(J_b @ J_a), rel=1e-9)
    assert local.middle == pytest.approx(norm(torch.func.jacrev(net.middle)(features.skips[-1])), rel=1e-9)


def test_the_bounds_are_theorem_3_4_with_their_m_0():
    net = StackedUNet(10, 3, scaling=ConstantScaling(0.7))
    local = measure_robustness(net, torch.randn(10))
    kappas = (1.0, 0.7, 0.7**2)
    assert local.coefficients == pytest.approx(kappas)
    assert math.exp(local.log_paper) == pytest.approx(robustness(kappas, max(local.composed), local.middle))
    assert math.exp(local.log_certified) == pytest.approx(robustness(kappas, max(local.separate), local.middle))
    assert local.log_paper <= local.log_certified


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 12),
    skips=st.integers(1, 4),
    depth=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    init=st.sampled_from(["kaiming", "norm-preserving"]),
    kappa=st.floats(0.01, 1.0),
)
def test_the_certified_bounds_are_never_exceeded(width, skips, depth, seed, init, kappa):
    scaling = ExplicitScaling([kappa**i for i in range(skips)])
    net = StackedUNet(width, skips, depth, scaling=scaling, init=init, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    x, delta = (torch.randn(k, width, generator=generator, dtype=torch.float64) for k in (1, 20))
    local = measure_robustness(net, x[0])
    assert not local.violates(local.log_certified)
    log_global = log_robustness(local.coefficients, *global_log_norms(net))
    assert local.log_certified <= log_global + 1e-9
    with torch.no_grad():  # perturbations as large as the input, across many linear regions
        change = (net(x + delta) - net(x)).norm(dim=1) / delta.norm(dim=1)
    assert float(change.max()) <= math.exp(log_global) * (1 + 1e-9)


@pytest.mark.parametrize("stretch", [2.0, 10.0, 100.0])
def test_the_constructed_network_violates_the_papers_bound(stretch):
    """Every ‖b_i∘a_i‖ is 1, so the bound is 1 + 1 + 1; the network stretches by 2·stretch² + …"""
    local = measure_robustness(counterexample(stretch), torch.ones(2))
    assert local.composed == pytest.approx((1.0, 1.0))
    assert math.exp(local.log_paper) == pytest.approx(3.0)
    assert local.network >= 2 * stretch**2
    assert local.violates(local.log_paper)
    assert not local.violates(local.log_certified)


def test_some_narrow_random_networks_violate_the_papers_bound():
    local = [
        measure_robustness(StackedUNet(2, 2, 1, ConstantScaling(0.7), "norm-preserving", seed), torch.ones(2))
        for seed in range(300)
    ]
    assert 1 <= sum(one.violates(one.log_paper) for one in local) <= 30
    assert not any(one.violates(one.log_certified) for one in local)


def test_coefficients_of_reads_the_scaling_of_the_network():
    net = StackedUNet(8, 3)
    assert coefficients_of(net) == (1.0, 1.0, 1.0)
    for spec in (UniformScaling(0.5), ConstantScaling(0.9), ExplicitScaling((0.0, 1.0, 2.0)), NoScaling()):
        apply(net, spec, replace=True)
        assert coefficients_of(net) == spec.coefficients(3)
    apply(net, LearnableScaling(calibration="scalar"), replace=True)
    with pytest.raises(UnsupportedNetworkError, match="LearnableScaling"):
        coefficients_of(net)


def test_a_batch_raises():
    with pytest.raises(InvalidValueError, match=r"\(8,\).*\(2, 8\)"):
        measure_robustness(StackedUNet(8, 2), torch.randn(2, 8))


def test_a_negative_coefficient_counts_by_its_size():
    net, x = StackedUNet(6, 2, scaling=ExplicitScaling([1.0, -0.5])).double(), torch.ones(6, dtype=torch.float64)
    found = measure_robustness(net, x)
    positive = measure_robustness(apply(net, ExplicitScaling([1.0, 0.5]), replace=True), x)
    assert found.coefficients == (1.0, -0.5)
    assert found.network <= math.exp(found.log_certified) * 1.001
    assert positive.coefficients == (1.0, 0.5)
