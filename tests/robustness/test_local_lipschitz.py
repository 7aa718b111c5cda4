"""Local Lipschitz constants against the SVD, Theorem 3.4 and random perturbations."""

import math

import pytest
import torch
from torch import nn

from scalelong import (
    ConstantScaling,
    ExplicitScaling,
    LearnableScaling,
    Site,
    SkipTuning,
    StackedUNet,
    UniformScaling,
    UViT,
    apply,
    build_unet,
    compose,
)  # fmt: skip
from scalelong.robustness import local_lipschitz
from scalelong.theory.bounds import robustness as bound_of
from scalelong.theory.lipschitz import measure_robustness


def small_uvit(scaling=None):
    return UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=6, num_heads=2, scaling=scaling).eval()


class Plain(nn.Module):
    def __init__(self, A):
        super().__init__()
        self.A = nn.Parameter(A)

    def forward(self, x, t):
        return x @ self.A.T


def test_a_linear_networks_constant_is_its_largest_singular_value():
    A = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) / 12**0.5
    result = local_lipschitz(Plain(A), torch.randn(3, 12), None, iterations=500, tolerance=1e-7)
    assert result.network == pytest.approx(float(torch.linalg.matrix_norm(A, 2)), rel=1e-3)
    assert result.converged
    assert result.log10_bound is None
    assert result.exceeded is None
    assert "no long skips" in result.note


@pytest.mark.parametrize("scaling", [None, ConstantScaling(0.6), UniformScaling()])
@pytest.mark.parametrize("skips", [1, 3])
def test_on_the_network_of_eq_3_the_bound_is_theorem_3_4(scaling, skips):
    torch.manual_seed(0)
    net = StackedUNet(10, skips, 2, scaling=scaling)
    x = torch.randn(10)
    exact = measure_robustness(net, x)
    result = local_lipschitz(net, x[None], iterations=2000, tolerance=1e-7)
    assert result.network == pytest.approx(exact.network, rel=1e-3)
    assert result.middle == pytest.approx(exact.middle, rel=1e-3)
    assert result.blocks == pytest.approx(exact.composed, rel=1e-3)
    assert result.coefficients == pytest.approx(exact.coefficients)
    assert result.log10_bound == pytest.approx(exact.log_paper / math.log(10), abs=1e-2)
    assert 10**result.log10_bound == pytest.approx(bound_of(result.coefficients, result.m0, result.middle), rel=1e-6)
    assert result.exceeded == (exact.network > math.exp(exact.log_paper))


def test_learned_coefficients_are_the_largest_of_each_skips_units():
    net = small_uvit(LearnableScaling())
    kappas = {}
    handle = net.skip_scaling.register_forward_hook(lambda m, a, o: kappas.update({a[1]: float(o.detach().max())}))
    result = local_lipschitz(net, torch.randn(2, 1, 8, 8), torch.tensor([10.0, 500.0]), iterations=5)
    handle.remove()
    assert result.coefficients == pytest.approx([kappas[i] for i in (1, 2, 3)], rel=1e-5)
    assert result.log10_bound is not None


@pytest.mark.parametrize(
    ("t", "expected"), [([100.0], (1.0, 1.0, 1.0)), ([700.0], (1.0, 0.75, 0.5)), ([100.0, 700.0], (1.0, 1.0, 1.0))]
)
def test_a_timed_scaling_has_the_coefficients_that_act_at_the_timestep(t, expected):
    timed = SkipTuning(0.5, timesteps=(500, 1000))
    for spec, factor in ((timed, 1.0), (compose(timed, UniformScaling(0.5)), 0.5)):
        result = local_lipschitz(apply(small_uvit(), spec), torch.randn(len(t), 1, 8, 8), torch.tensor(t), iterations=2)
        assert result.coefficients == pytest.approx([factor * kappa for kappa in expected])


def test_a_negative_coefficient_counts_with_its_size():
    torch.manual_seed(0)
    learned, x = StackedUNet(10, 2, scaling=LearnableScaling("scalar")), torch.randn(1, 10)
    with torch.no_grad():
        for parameter in learned.skip_scaling.parameters():
            parameter.fill_(-0.5)
    results = [
        local_lipschitz(net, x)
        for net in (learned, *(StackedUNet(10, 2, scaling=ExplicitScaling([k, k])) for k in (-0.5, 0.5)))
    ]
    assert [one.coefficients for one in results] == [(0.5, 0.5), (-0.5, -0.5), (0.5, 0.5)]
    assert all(one.log10_bound is not None for one in results)
    assert 10 ** results[1].log10_bound == pytest.approx(bound_of((0.5, 0.5), results[1].m0, results[1].middle))


def test_a_real_network_amplifies_no_perturbation_by_more_than_its_constant():
    net = small_uvit()
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([300.0])
    result = local_lipschitz(net, x, t, iterations=200, tolerance=1e-4)
    with torch.no_grad():
        for seed in range(20):
            delta = 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            stretched = (net(x + delta, t) - net(x, t)).norm() / delta.norm()
            assert stretched <= result.network * 1.02
    assert all(p.grad is None for p in net.parameters())


class Concatenating(nn.Module):
    """Its decoder receives the concatenation, so the skip is not an argument of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.middle, self.decoder = nn.Linear(6, 4), nn.Linear(4, 5), nn.Linear(9, 6)

    def forward(self, x):
        skip = self.encoder(x)
        return self.decoder(torch.cat([self.middle(skip), skip], -1))


def test_skips_that_cannot_be_separated_are_noted():
    torch.manual_seed(0)
    net = Concatenating()
    apply(net, UniformScaling(0.5), sites=[Site("decoder", 0, channels=4, trailing=True, dim=-1)])
    x = torch.randn(1, 6)
    result = local_lipschitz(net, x, iterations=500, tolerance=1e-7)
    whole = torch.func.jacrev(net)(x).reshape(6, 6)
    assert result.network == pytest.approx(float(torch.linalg.matrix_norm(whole.detach(), 2)), rel=1e-3)
    assert result.coefficients == (0.5,)
    assert result.blocks is None
    assert result.log10_bound is None
    assert "spectral_norm" in result.note


def test_a_factor_inside_the_block_has_no_bound_of_theorem_3_4():
    """after_norm: κ_i is part of b_i, so a sum over κ_i·M_0^i would count it twice."""
    net = build_unet(
        "cifar10", sample_size=8, in_channels=1, out_channels=1, block_out_channels=(16, 16), norm_num_groups=4,
        layers_per_block=1, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
        add_attention=False,
    ).eval()  # fmt: skip
    x, t = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([500])
    assert local_lipschitz(net, x, t).log10_bound is not None
    inside = local_lipschitz(apply(net, UniformScaling(0.1), placement="after_norm"), x, t)
    assert inside.log10_bound is inside.exceeded is None
    assert "after_norm" in inside.note
    assert len(inside.blocks) == 4
