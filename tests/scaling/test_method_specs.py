"""The other methods: formulas, validation, JSON, short names, phases and composition."""

import json
import math

import pytest
import torch

from scalelong.errors import InvalidValueError, UnknownNameError, UnsupportedNetworkError
from scalelong.scaling import (
    ConstantScaling,
    ExplicitScaling,
    FreeU,
    GatedScaling,
    LearnableScaling,
    LerpScaling,
    MagnitudePreserving,
    NormScaling,
    NoScaling,
    Scaling,
    SkipAdapter,
    SkipShape,
    SkipTuning,
    SparseScaling,
    StableScaling,
    UniformScaling,
    compose,
    parse_scaling,
    scaling_names,
)

# -------------------------------------------------------------------------------------------------- formulas


def test_innermost_has_the_same_end_points_at_any_depth():
    for n in (2, 6, 12, 40):
        kappas = ConstantScaling(innermost=0.1).coefficients(n)
        assert (kappas[0], kappas[-1]) == (1.0, pytest.approx(0.1))
        assert kappas == pytest.approx([0.1 ** (k / (n - 1)) for k in range(n)])
        log_a, log_r = ConstantScaling(innermost=0.1).geometric(n)
        assert kappas[-1] == pytest.approx(math.exp(log_a + (n - 1) * log_r))
    assert ConstantScaling(innermost=0.1).coefficients(1) == (1.0,)


def test_skip_tuning_is_linear_from_innermost_to_outermost():
    assert SkipTuning(innermost=0.6).coefficients(5) == pytest.approx((1.0, 0.9, 0.8, 0.7, 0.6))
    assert SkipTuning(0.5, outermost=0.9).coefficients(3) == pytest.approx((0.9, 0.7, 0.5))
    assert SkipTuning(0.7).coefficients(1) == (0.7,)


def test_sparse_keeps_every_stride_th_skip_from_the_outermost():
    assert SparseScaling(stride=3).coefficients(7) == (1, 0, 0, 1, 0, 0, 1)
    assert SparseScaling(stride=1).coefficients(3) == (1, 1, 1)


@pytest.mark.parametrize(("n_x", "n_s", "t"), [(8, 8, 0.5), (64, 16, 0.5), (16, 64, 0.3)])
def test_mp_equals_its_formula_and_keeps_the_magnitude(n_x, n_s, t):
    module = MagnitudePreserving(t).build([SkipShape(n_s)])
    torch.manual_seed(0)
    x, s = torch.randn(4, n_x, 64, 64, dtype=torch.float64), torch.randn(4, n_s, 64, 64, dtype=torch.float64)
    skip, backbone = module.join(s, x, 1)
    c = math.sqrt((n_x + n_s) / ((1 - t) ** 2 + t**2))
    torch.testing.assert_close(backbone, x * (c * (1 - t) / math.sqrt(n_x)))
    torch.testing.assert_close(skip, s * (c * t / math.sqrt(n_s)))
    joined = torch.cat([backbone, skip], dim=1)
    assert joined.square().mean().item() == pytest.approx(1.0, rel=0.01)  # 5·10^5 unit normal numbers
    shares = backbone.norm() / (1 - t), skip.norm() / t
    assert shares[0].item() == pytest.approx(shares[1].item(), rel=0.01)


@pytest.mark.parametrize("dim", [1, -1])
def test_norm_over_the_skip_equals_torch(dim):
    torch.manual_seed(0)
    s = 3 + 2 * torch.randn((2, 6, 4, 4) if dim == 1 else (2, 4, 6))
    tokens = s.movedim(dim, -1)
    for kind, reference in (("layer", torch.nn.LayerNorm(6, eps=1e-6)), ("rms", torch.nn.RMSNorm(6, eps=1e-6))):
        module = NormScaling(kind).build([SkipShape(6, dim)])
        with torch.no_grad():
            for own, other in zip(module.parameters(), reference.parameters(), strict=True):
                own.copy_(torch.randn(6))
                other.copy_(own)
        torch.testing.assert_close(module.scale(s, 1), reference(tokens).movedim(-1, dim))
    fixed = NormScaling(gain=0.3).build([SkipShape(6, dim)])
    assert not list(fixed.parameters())
    torch.testing.assert_close(
        fixed.scale(s, 1).movedim(dim, -1).std(-1, correction=0), torch.full_like(tokens[..., 0], 0.3)
    )


def test_lerp_is_torchs_lerp_and_the_gate_starts_at_one():
    s, x = torch.randn(2, 3), torch.randn(2, 3)
    module = LerpScaling(0.3).build([SkipShape(3)])
    skip, backbone = module.join(s, x, 1)
    torch.testing.assert_close(skip + backbone, torch.lerp(s, x, 0.3))
    gate = GatedScaling().build([SkipShape(3)] * 2)
    assert gate.scalars() == (1.0, 1.0)
    with torch.no_grad():
        gate.log_gate.fill_(-100.0)
    assert min(gate.scalars()) >= 0


def test_the_adapter_equals_its_formula():
    module = SkipAdapter(rank=2).build([SkipShape(5)])
    s = torch.randn(2, 5, 3, 3)
    assert torch.equal(module.scale(s, 1), s)
    torch.nn.init.normal_(module.up[0].weight)
    hidden = torch.nn.functional.gelu(torch.einsum("rc,bchw->brhw", module.down[0].weight, s))
    expected = s + torch.einsum("cr,brhw->bchw", module.up[0].weight, hidden)
    torch.testing.assert_close(module.scale(s, 1), expected)


# ------------------------------------------------------------------------------------------------- names, JSON

SPECS = [
    NormScaling(), NormScaling("rms", over="both", gain=0.5), NormScaling(init="identity"), MagnitudePreserving(0.3),
    GatedScaling(), LerpScaling(0.4), SparseScaling(2), ConstantScaling(innermost=0.1), SkipTuning(0.7, 0.9, (0, 500)),
    FreeU(1.1, 1.2, 0.9, 0.2, version=2), SkipAdapter(rank=8), compose(ConstantScaling(0.7), FreeU()),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
def test_specs_round_trip_through_json(spec):
    again = Scaling.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert spec.phase in ("training", "fine-tuning", "inference")


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("norm", NormScaling("layer")), ("norm:rms", NormScaling(kind="rms")), ("mp", MagnitudePreserving(0.5)),
        ("mp:0.3", MagnitudePreserving(0.3)), ("gate", GatedScaling()), ("lerp:0.4", LerpScaling(0.4)),
        ("sparse", SparseScaling(3)), ("sparse:2", SparseScaling(2)), ("adapter:8", SkipAdapter(8)),
        ("skip-tuning:0.7", SkipTuning(innermost=0.7)), ("freeu:sd1.5", FreeU(1.5, 1.6, 0.9, 0.2)),
        ("freeu:1.1,1.2,0.9,0.2", FreeU(1.1, 1.2, 0.9, 0.2)), ("cs-innermost:0.1", ConstantScaling(innermost=0.1)),
    ],
)  # fmt: skip
def test_short_forms(text, spec):
    assert parse_scaling(text) == spec
    assert text.partition(":")[0] in scaling_names()


def test_the_named_settings_of_freeu_are_the_published_ones():
    named = {name: FreeU.named(name).factors for name in ("sd1.4", "sd1.5", "sd2.1", "sdxl")}
    assert named == {
        "sd1.4": (1.3, 1.4, 0.9, 0.2), "sd1.5": (1.5, 1.6, 0.9, 0.2), "sd2.1": (1.4, 1.6, 0.9, 0.2),
        "sdxl": (1.3, 1.4, 0.9, 0.2),
    }  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"did you mean 'sdxl'.*known: sd1.4"):
        FreeU.named("sdx")


# -------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: NormScaling("group"), "kind 'group'.*layer, rms"),
        (lambda: NormScaling(over="x"), "over 'x'.*skip, both"),
        (lambda: NormScaling(gain=-1), "gain must be a finite number > 0, got -1"),
        (lambda: NormScaling(gain=1.0, init="identity"), "gain must be 'learned', got 1.0"),
        (lambda: MagnitudePreserving(1.5), "t must be a number from 0 to 1, got 1.5"),
        (lambda: LerpScaling(math.nan), "weight must be a finite number, got nan"),
        (lambda: SparseScaling(0), "stride must be an integer >= 1, got 0"),
        (lambda: SkipAdapter(rank=1.5), "rank must be an integer >= 1, got 1.5"),
        (lambda: SkipTuning(-0.1), "innermost must be a finite number >= 0, got -0.1"),
        (lambda: SkipTuning(0.8, timesteps=(500, 0)), r"timesteps must be \(first, last\).*\(500, 0\)"),
        (lambda: FreeU(b1=math.inf), "b1 must be a finite number, got inf"),
        (lambda: FreeU(version=3), "version must be 1 or 2, got 3"),
        (lambda: ConstantScaling(innermost=0), "innermost must be a finite number > 0, got 0"),
        (lambda: ConstantScaling(0.5, innermost=0.1), "innermost = 0.1 excludes kappa"),
        (lambda: ConstantScaling(), "kappa must be given"),
        (lambda: parse_scaling("freeu:big"), "FreeU setting 'big'.*sd1.4"),
        (lambda: parse_scaling("freeu:1,2"), "freeu:sdxl"),
        (lambda: parse_scaling("sparse:2.5"), "stride must be an integer >= 1, got 2.5"),
    ],
)
def test_an_invalid_value_names_the_value_and_what_is_allowed(make, match):
    with pytest.raises(InvalidValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ((ConstantScaling(0.7), LearnableScaling()), "both weight the skip"),
        ((ConstantScaling(0.7), MagnitudePreserving()), "both weight the skip"),
        ((FreeU(), FreeU()), "of one kind"),
        ((ConstantScaling(0.7), NormScaling()), "divides its factor out"),
        ((StableScaling(), FreeU()), "does not act on long skips"),
        ((NoScaling(),), "two scalings or more"),
    ],
)
def test_what_makes_no_sense_together_is_refused(parts, match):
    with pytest.raises(InvalidValueError, match=match):
        compose(*parts)


def test_what_makes_sense_together_composes():
    assert compose(NoScaling(), FreeU()) == FreeU()
    assert compose(ConstantScaling(0.7), SkipTuning(0.5)).coefficients(3) == pytest.approx(
        (1.0, 0.7 * 0.75, 0.49 * 0.5)
    )
    assert compose(ConstantScaling(0.7), FreeU()).phase == "inference"
    assert compose(SkipAdapter(), ConstantScaling(0.7)).phase == "fine-tuning"
    assert compose(NormScaling(), UniformScaling(0.5)).phase == "training"
    assert compose(SkipAdapter(), ConstantScaling(0.7)).freezes
    assert ExplicitScaling([1.0]).phase == "any"


def test_a_learned_gain_over_both_requires_the_width_of_the_join():
    with pytest.raises(UnsupportedNetworkError, match="long skip 1.*example"):
        NormScaling(over="both").build([SkipShape(4)])
