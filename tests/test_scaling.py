"""What κ is: formulas by hand, validation, JSON, and the calibration network's mathematics."""

import json
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalelong.errors import ScaleLongError, ScalingWarning
from scalelong.scaling import (
    ConstantScaling,
    ExplicitScaling,
    LearnableScaling,
    NoScaling,
    ReZeroScaling,
    Scaling,
    SkipShape,
    StableScaling,
    UniformScaling,
    build,
    parse_scaling,
    scale,
)

MAPS = [SkipShape(4), SkipShape(8), SkipShape(8), SkipShape(16)]
TOKENS = [SkipShape(32, dim=-1, tokens=17)] * 3


# ---------------------------------------------------------------------------------------------- constants


def test_cs_is_kappa_to_the_power_i_minus_1_outermost_first():
    assert ConstantScaling(0.5).coefficients(4) == (1.0, 0.5, 0.25, 0.125)


def test_reversed_cs_is_kappa_to_the_power_n_minus_i_plus_1():
    assert ConstantScaling(0.5, reverse=True).coefficients(3) == (0.125, 0.25, 0.5)


def test_uniform_scaling_defaults_to_one_over_root_two():
    assert UniformScaling().coefficients(2) == pytest.approx((1 / math.sqrt(2),) * 2, rel=1e-15)


def test_no_scaling_is_ones_and_explicit_is_what_was_given():
    assert NoScaling().coefficients(3) == (1.0, 1.0, 1.0)
    assert ExplicitScaling([1, 0.5, 0]).coefficients(3) == (1.0, 0.5, 0.0)


@given(n=st.integers(1, 40), kappa=st.floats(0.05, 1.0))
def test_cs_and_reversed_cs_are_mirror_images_times_kappa(n, kappa):
    forward = ConstantScaling(kappa).coefficients(n)
    backward = ConstantScaling(kappa, reverse=True).coefficients(n)
    assert len(forward) == n
    assert forward[0] == 1.0
    assert all(b == pytest.approx(kappa * f) for f, b in zip(forward, reversed(backward), strict=True))
    assert all(later <= earlier for earlier, later in zip(forward, forward[1:], strict=False))


def test_explicit_scaling_of_another_length_names_both_numbers():
    with pytest.raises(ScaleLongError, match=r"2 numbers.*3 long skips"):
        ExplicitScaling([1, 1]).coefficients(3)


# --------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("kappa", [0, -0.5, math.nan, math.inf, "0.5", None, True, [0.5]])
def test_a_kappa_that_is_no_positive_number_is_refused(kappa):
    with pytest.raises(ValueError, match="kappa"):
        ConstantScaling(kappa)


@pytest.mark.parametrize("value", [0, -1, math.nan, "x"])
def test_a_uniform_value_that_is_no_positive_number_is_refused(value):
    with pytest.raises(ValueError, match="value"):
        UniformScaling(value)


@pytest.mark.parametrize("coefficients", [[], [1, -1], [1, math.nan], "0.5", 3, None])
def test_coefficients_that_are_no_list_of_numbers_are_refused(coefficients):
    with pytest.raises(ValueError, match="coefficients"):
        ExplicitScaling(coefficients)


def test_kappa_above_one_is_allowed_with_a_warning():
    with pytest.warns(ScalingWarning, match="above 1"):
        assert ConstantScaling(1.2).coefficients(2) == (1.0, 1.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConstantScaling(1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "es"},
        {"activation": "gelu"},
        {"gate": "token"},
        {"init": "zero"},
        {"reduction": 0},
        {"reduction": 2.5},
        {"shared": 1},
    ],
)
def test_an_unknown_option_of_ls_is_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LearnableScaling(**options)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_a_number_of_skips_that_is_none_is_refused(n):
    with pytest.raises(ValueError, match="number of long skips"):
        NoScaling().coefficients(n)


# ---------------------------------------------------------------------------------------- names and JSON

SPECS = [
    NoScaling(),
    UniformScaling(0.3),
    ConstantScaling(0.7),
    ConstantScaling(0.7, reverse=True),
    ExplicitScaling([1, 0.25]),
    LearnableScaling(),
    LearnableScaling("ie", 4, "mish", False, "channels", "identity"),
    StableScaling(0.3),
    ReZeroScaling(),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_specs_round_trip_through_json(spec):
    assert Scaling.from_json(spec.to_json()) == spec
    assert Scaling.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert parse_scaling(spec.to_dict()) == parse_scaling(spec) == spec
    assert hash(spec) == hash(Scaling.from_json(spec.to_json()))


@given(kappa=st.floats(1e-6, 1.0), reverse=st.booleans())
def test_json_keeps_kappa_to_the_last_bit(kappa, reverse):
    spec = ConstantScaling(kappa, reverse)
    assert Scaling.from_json(spec.to_json()) == spec


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        ConstantScaling(0.5).kappa = 0.6


def test_short_names_make_specs():
    assert parse_scaling("cs", kappa=0.7) == ConstantScaling(0.7)
    assert parse_scaling("cs-reverse", kappa=0.7) == ConstantScaling(0.7, reverse=True)
    assert parse_scaling("uniform") == UniformScaling()
    assert parse_scaling("uniform", kappa=0.9) == UniformScaling(0.9)
    assert parse_scaling("none") == parse_scaling(None) == NoScaling()
    assert parse_scaling("ls", calibration="ie", gate=None) == LearnableScaling("ie")
    assert parse_scaling("stable", tau=0.3) == StableScaling(0.3)
    assert parse_scaling("rezero") == ReZeroScaling()


def test_a_misspelt_name_suggests_the_right_one():
    with pytest.raises(ScaleLongError, match="did you mean 'uniform'"):
        parse_scaling("unifrom")
    with pytest.raises(ScaleLongError, match="did you mean 'kappa'"):
        parse_scaling("cs", kapa=0.5)
    with pytest.raises(ScaleLongError, match="needs kappa"):
        parse_scaling("cs")


@pytest.mark.parametrize("bad", ["{", "[]", "3", '{"kind": 3}', '{"kappa": 0.5}', '{"kind": "cs", "kappa": null}'])
def test_broken_json_is_refused_in_a_sentence(bad):
    with pytest.raises(ScaleLongError):
        Scaling.from_json(bad)


# ------------------------------------------------------------------------------------------------- modules


def test_fixed_scalings_hold_no_state():
    module = build(ConstantScaling(0.5), MAPS)
    assert not module.state_dict()
    assert not list(module.parameters())


def test_kappa_of_one_gives_the_tensor_itself():
    x = torch.randn(2, 3)
    assert scale(x, 1.0) is x
    assert torch.equal(scale(x, 0.5), x * 0.5)


def test_se_at_uvit_s2_has_the_parameters_of_the_paper():
    count = sum(p.numel() for p in build(LearnableScaling(), [SkipShape(512, -1, 257)] * 6).parameters())
    assert count == 257 * 16 + 16 + 16 * 257 + 257  # about 0.01M
    assert round(count / 1e6, 2) == 0.01


def test_se_is_sigmoid_of_two_matrices_on_the_mean_over_channels_gating_tokens():
    module = build(LearnableScaling(reduction=4), TOKENS)
    x = torch.randn(5, 17, 32)
    zeta = module.networks.zeta
    W2, b2, W1, b1 = zeta.layer1.weight, zeta.layer1.bias, zeta.layer2.weight, zeta.layer2.bias  # Eq. 11's names
    assert W2.shape == (4, 17)
    expected = 1 / (1 + torch.exp(-(torch.clamp(x.mean(-1) @ W2.T + b2, min=0) @ W1.T + b1)))
    torch.testing.assert_close(module(x, 2), expected[:, :, None])


def test_channel_gating_averages_over_space_and_shares_zeta_at_the_smallest_width():
    module = build(LearnableScaling(reduction=2), MAPS)
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
def test_odd_widths_have_a_hidden_unit_at_least(width):
    module = build(LearnableScaling(), [SkipShape(width), SkipShape(2 * width)])
    assert module(torch.randn(3, width, 2, 2), 1).shape == (3, width, 1, 1)
    assert module(torch.randn(3, 2 * width, 2, 2), 2).shape == (3, 2 * width, 1, 1)


@pytest.mark.parametrize("space", [(6,), (4, 3), (2, 3, 2)], ids=["series", "maps", "volumes"])
@pytest.mark.parametrize("spec", [LearnableScaling(), LearnableScaling("ie"), LearnableScaling(shared=False)])
def test_channels_are_gated_whatever_the_number_of_space_dimensions(spec, space):
    module = build(spec, MAPS)
    for i, shape in enumerate(MAPS, start=1):
        x = torch.randn(2, shape.channels, *space)
        kappa = module(x, i)
        assert kappa.shape == (2, shape.channels, *[1] * len(space))
        assert ((kappa > 0) & (kappa < 1)).all()


def test_tokens_can_be_gated_by_channels_too():
    module = build(LearnableScaling(gate="channels"), TOKENS)
    assert module(torch.randn(2, 9, 32), 1).shape == (2, 1, 32)  # of any length


def test_ie_is_sigmoid_of_scale_times_mean_plus_shift_from_minus_one():
    module = build(LearnableScaling("ie"), TOKENS)
    x = torch.randn(2, 17, 32)
    torch.testing.assert_close(module(x, 1), torch.full((2, 17, 1), 1 / (1 + math.e)))
    with torch.no_grad():
        module.networks.by_width["17"].scale.fill_(2.0)
    torch.testing.assert_close(module(x, 3), torch.sigmoid(2 * x.mean(-1, keepdim=True) - 1))


def test_a_learned_scalar_starts_at_one_for_each_skip():
    module = build(LearnableScaling("scalar"), MAPS)
    assert module.kappa.tolist() == [1.0] * 4
    with torch.no_grad():
        module.kappa[2] = 0.25
    assert module(torch.randn(1, 8, 2, 2), 3).item() == 0.25


@pytest.mark.parametrize("shapes", [MAPS, TOKENS], ids=["maps", "tokens"])
@pytest.mark.parametrize("calibration", ["se", "ie", "scalar"])
@pytest.mark.parametrize("shared", [True, False])
def test_identity_init_is_exactly_one_with_a_gradient(shapes, calibration, shared):
    module = build(LearnableScaling(calibration, shared=shared, init="identity"), shapes)
    for i, shape in enumerate(shapes, start=1):
        x = torch.randn(3, 17, 32) if shape.tokens else torch.randn(3, shape.channels, 4, 4)
        kappa = module(x, i)
        assert (kappa == 1).all()
        (x * kappa).square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert any((g != 0).any() for g in gradients)


def test_paper_init_starts_near_one_half():
    kappa = build(LearnableScaling(), [SkipShape(512, -1, 257)])(torch.randn(8, 257, 512), 1)
    assert abs(kappa.mean().item() - 0.5) < 0.05


def test_unshared_networks_are_the_skips_own():
    module = build(LearnableScaling(shared=False), TOKENS)
    assert len({id(n) for n in module.networks.each}) == 3
    x = torch.randn(2, 17, 32)
    before = module(x, 1), module(x, 2)
    nn.init.zeros_(module.networks.each[1].layer2.weight)
    assert torch.equal(module(x, 1), before[0])
    assert not torch.equal(module(x, 2), before[1])


@pytest.mark.parametrize("shapes", [MAPS, TOKENS], ids=["maps", "tokens"])
@pytest.mark.parametrize("activation", ["relu", "elu", "mish"])
def test_gradients_of_ls_agree_with_finite_differences(shapes, activation):
    module = build(LearnableScaling(reduction=2, activation=activation), shapes).double()
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


def test_another_length_than_the_gates_is_refused():
    module = build(LearnableScaling(), TOKENS)
    with pytest.raises(ScaleLongError, match="long skip 2 has 18 tokens .* for 17"):
        module(torch.randn(1, 18, 32), 2)


def test_gating_tokens_needs_their_number_and_channels_theirs():
    with pytest.raises(ScaleLongError, match="fixed number of tokens"):
        build(LearnableScaling(gate="tokens"), MAPS)
    with pytest.raises(ScaleLongError, match="number of channels of long skip 1 is unknown"):
        build(LearnableScaling(), [SkipShape(None)])


@given(
    n=st.integers(1, 6),
    width=st.integers(1, 24),
    batch=st.integers(1, 3),
    calibration=st.sampled_from(["se", "ie"]),
    shared=st.booleans(),
)
def test_every_coefficient_lies_between_zero_and_one(n, width, batch, calibration, shared):
    module = build(LearnableScaling(calibration, shared=shared), [SkipShape(width * (1 + k % 2)) for k in range(n)])
    for i in range(1, n + 1):
        x = 10 * torch.randn(batch, width * (1 + (i - 1) % 2), 2, 2)
        kappa = module(x, i)
        assert kappa.shape == (*x.shape[:2], 1, 1)
        assert ((kappa >= 0) & (kappa <= 1)).all()


def test_bf16_skips_get_bf16_coefficients():
    module = build(LearnableScaling(), TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(2, 17, 32, dtype=torch.bfloat16), 1).dtype == torch.bfloat16
        assert module(torch.randn(2, 17, 32), 1).dtype == torch.float32
