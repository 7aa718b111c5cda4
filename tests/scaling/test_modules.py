"""Modules: the mathematics of the calibration network, its initialization and its gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalelong.errors import UnsupportedNetworkError
from scalelong.scaling import ConstantScaling, LearnableScaling, ReZeroScaling, SkipShape, StableScaling, UniformScaling

MAPS = [SkipShape(4), SkipShape(8), SkipShape(8), SkipShape(16)]
TOKENS = [SkipShape(32, dim=-1, tokens=17)] * 3


def test_fixed_scalings_hold_no_state():
    module = ConstantScaling(0.5).build(MAPS)
    assert not module.state_dict()
    assert not list(module.parameters())


def test_kappa_of_one_returns_the_tensor_itself():
    x = torch.randn(2, 3)
    assert ConstantScaling(0.5).build(MAPS).scale(x, 1) is x
    assert torch.equal(UniformScaling(0.5).build(MAPS).scale(x, 1), x * 0.5)


def test_se_at_uvit_s2_has_the_parameters_of_the_paper():
    count = sum(p.numel() for p in LearnableScaling().build([SkipShape(512, -1, 257)] * 6).parameters())
    assert count == 257 * 16 + 16 + 16 * 257 + 257  # about 0.01M
    assert round(count / 1e6, 2) == 0.01


def test_se_is_sigmoid_of_two_matrices_on_the_mean_over_channels_gating_tokens():
    module = LearnableScaling(reduction=4, activation="relu").build(TOKENS)
    x = torch.randn(5, 17, 32)
    zeta = module.networks.zeta
    W2, b2, W1, b1 = zeta.layer1.weight, zeta.layer1.bias, zeta.layer2.weight, zeta.layer2.bias  # Eq. 11's names
    assert W2.shape == (4, 17)
    expected = 1 / (1 + torch.exp(-(torch.clamp(x.mean(-1) @ W2.T + b2, min=0) @ W1.T + b1)))
    torch.testing.assert_close(module(x, 2), expected[:, :, None])


def test_channel_gating_averages_over_space_and_shares_zeta_at_the_smallest_width():
    module = LearnableScaling(reduction=2).build(MAPS)
    networks = module.networks
    assert networks.zeta.layer1.weight.shape == (2, 4)
    assert set(networks.encoders) == set(networks.decoders) == {"4", "8", "16"}
    assert networks.encoders["16"].layer1.weight.shape == (16 // (16 // 4), 16)
    x = torch.randn(2, 16, 5, 3)
    expected = torch.sigmoid(networks.decoders["16"](networks.zeta(networks.encoders["16"](x.mean((2, 3))))))
    kappa = module(x, 4)
    assert kappa.shape == (2, 16, 1, 1)
    torch.testing.assert_close(kappa[:, :, 0, 0], expected)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 9, 130])
def test_small_and_odd_widths_have_at_least_one_hidden_unit(width):
    module = LearnableScaling().build([SkipShape(width), SkipShape(2 * width)])
    assert module(torch.randn(3, width, 2, 2), 1).shape == (3, width, 1, 1)
    assert module(torch.randn(3, 2 * width, 2, 2), 2).shape == (3, 2 * width, 1, 1)


@pytest.mark.parametrize("space", [(6,), (4, 3), (2, 3, 2)], ids=["series", "maps", "volumes"])
@pytest.mark.parametrize("spec", [LearnableScaling(), LearnableScaling("ie"), LearnableScaling(shared=False)])
def test_channels_are_gated_in_any_number_of_spatial_dimensions(spec, space):
    module = spec.build(MAPS)
    for i, shape in enumerate(MAPS, start=1):
        x = torch.randn(2, shape.channels, *space)
        kappa = module(x, i)
        assert kappa.shape == (2, shape.channels, *[1] * len(space))
        assert ((kappa > 0) & (kappa < 1)).all()


def test_tokens_can_be_gated_by_channels():
    module = LearnableScaling(gate="channels").build(TOKENS)
    assert module(torch.randn(2, 9, 32), 1).shape == (2, 1, 32)  # of any length


def test_ie_is_sigmoid_of_scale_times_mean_plus_shift_from_minus_one():
    module = LearnableScaling("ie").build(TOKENS)
    x = torch.randn(2, 17, 32)
    torch.testing.assert_close(module(x, 1), torch.full((2, 17, 1), 1 / (1 + math.e)))
    with torch.no_grad():
        module.networks.by_width["17"].scale.fill_(2.0)
    torch.testing.assert_close(module(x, 3), torch.sigmoid(2 * x.mean(-1, keepdim=True) - 1))


def test_a_learned_scalar_starts_at_one_for_each_skip():
    module = LearnableScaling("scalar").build(MAPS)
    assert module.kappa.tolist() == [1.0] * 4
    with torch.no_grad():
        module.kappa[2] = 0.25
    assert module(torch.randn(1, 8, 2, 2), 3).item() == 0.25


@pytest.mark.parametrize("shapes", [MAPS, TOKENS], ids=["maps", "tokens"])
@pytest.mark.parametrize("calibration", ["se", "ie", "scalar"])
@pytest.mark.parametrize("shared", [True, False])
def test_identity_init_is_exactly_one_with_a_gradient(shapes, calibration, shared):
    module = LearnableScaling(calibration, shared=shared, init="identity").build(shapes)
    for i, shape in enumerate(shapes, start=1):
        x = torch.randn(3, 17, 32) if shape.tokens else torch.randn(3, shape.channels, 4, 4)
        kappa = module(x, i)
        assert (kappa == 1).all()
        (x * kappa).square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert any((g != 0).any() for g in gradients)


def dead_seeds(spec, shapes, seeds=60):
    """Seeds in which a κ_i has no derivative with respect to its input, or a weight has no gradient."""
    dead = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        module = spec.build(shapes)
        sizes = [(s.tokens, s.channels) if s.tokens else (s.channels, 2, 2) for s in shapes]
        xs = [(0.3 * torch.randn(4, *size)).requires_grad_() for size in sizes]
        sum((module(x, i) * torch.randn(4, *sizes[i - 1])).sum() for i, x in enumerate(xs, start=1)).backward()
        tensors = [*xs, *(p for name, p in module.named_parameters() if name.endswith("weight"))]
        if not all(t.grad.any() for t in tensors):
            dead.append(seed)
    return dead


@pytest.mark.parametrize("shapes", [[SkipShape(32), SkipShape(64)], [SkipShape(8, -1, 17)] * 2], ids=["maps", "tokens"])
def test_the_default_form_is_never_dead_and_the_papers_often_is(shapes):
    assert not dead_seeds(LearnableScaling(), shapes)
    assert len(dead_seeds(LearnableScaling(activation="relu"), shapes)) > 6  # about a third (four, two or one ReLUs)


def test_paper_init_starts_near_one_half():
    kappa = LearnableScaling().build([SkipShape(512, -1, 257)])(torch.randn(8, 257, 512), 1)
    assert abs(kappa.mean().item() - 0.5) < 0.05


def test_unshared_networks_belong_to_one_skip_each():
    module = LearnableScaling(shared=False).build(TOKENS)
    assert len({id(n) for n in module.networks.each}) == 3
    x = torch.randn(2, 17, 32)
    before = module(x, 1), module(x, 2)
    nn.init.zeros_(module.networks.each[1].layer2.weight)
    assert torch.equal(module(x, 1), before[0])
    assert not torch.equal(module(x, 2), before[1])


@pytest.mark.parametrize("shapes", [MAPS, TOKENS], ids=["maps", "tokens"])
@pytest.mark.parametrize("activation", ["relu", "elu", "mish"])
def test_gradients_of_ls_agree_with_finite_differences(shapes, activation):
    module = LearnableScaling(reduction=2, activation=activation).build(shapes).double()
    xs = [
        torch.randn(2, 17, 32, dtype=torch.double) if s.tokens else torch.randn(2, s.channels, 3, 3, dtype=torch.double)
        for s in shapes
    ]

    def f(*tensors):
        return sum((t * module(t, i)).square().mean() for i, t in enumerate(tensors, start=1))

    assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in xs], fast_mode=True)
    parameters = dict(module.named_parameters())

    def g(*values):
        named = dict(zip(parameters, values, strict=True))
        return sum(
            (x * torch.func.functional_call(module, named, (x, i))).square().mean()
            for i, x in enumerate([x.detach() for x in xs], start=1)
        )

    assert torch.autograd.gradcheck(g, list(parameters.values()), fast_mode=True)


def test_a_wrong_number_of_tokens_is_rejected():
    module = LearnableScaling().build(TOKENS)
    with pytest.raises(UnsupportedNetworkError, match="long skip 2 has 18 tokens.* 17"):
        module(torch.randn(1, 18, 32), 2)


def test_gating_requires_a_known_number_of_tokens_or_channels():
    with pytest.raises(UnsupportedNetworkError, match="tokens.*long skip 1"):
        LearnableScaling(gate="tokens").build(MAPS)
    with pytest.raises(UnsupportedNetworkError, match="channels of long skip 1"):
        LearnableScaling().build([SkipShape(None)])


def test_block_scalings_are_one_factor_per_block():
    x = torch.randn(2, 3)
    assert StableScaling(0.3).build([SkipShape(None)] * 2)(x, 2) == 0.3
    rezero = ReZeroScaling().build([SkipShape(None)] * 2)
    assert list(rezero.state_dict()) == ["alpha"]
    assert rezero(x, 2).item() == 0.0


@given(
    n=st.integers(1, 6),
    width=st.integers(1, 24),
    batch=st.integers(1, 3),
    calibration=st.sampled_from(["se", "ie"]),
    shared=st.booleans(),
)
def test_every_coefficient_lies_between_zero_and_one(n, width, batch, calibration, shared):
    module = LearnableScaling(calibration, shared=shared).build([SkipShape(width * (1 + k % 2)) for k in range(n)])
    for i in range(1, n + 1):
        x = 10 * torch.randn(batch, width * (1 + (i - 1) % 2), 2, 2)
        kappa = module(x, i)
        assert kappa.shape == (*x.shape[:2], 1, 1)
        assert ((kappa >= 0) & (kappa <= 1)).all()


def test_bf16_skips_get_bf16_coefficients():
    module = LearnableScaling().build(TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(2, 17, 32, dtype=torch.bfloat16), 1).dtype == torch.bfloat16
        assert module(torch.randn(2, 17, 32), 1).dtype == torch.float32
