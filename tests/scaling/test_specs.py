"""Specs: the formulas of κ_i, validation, JSON, names and labels."""

import json
import math
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelong.errors import InvalidValueError, ScalingWarning, UnknownNameError, UnsupportedNetworkError
from scalelong.scaling import (
    ConstantScaling,
    ExplicitScaling,
    FixedScaling,
    LearnableScaling,
    NoScaling,
    ReZeroScaling,
    Scaling,
    StableScaling,
    UniformScaling,
    kappa_notices,
    parse_scaling,
    scaling_names,
)
from scalelong.scaling.specs import _REGISTRY

# ---------------------------------------------------------------------------------------------- constants


def test_cs_is_kappa_to_the_power_i_minus_1_outermost_first():
    assert ConstantScaling(0.5).coefficients(4) == (1.0, 0.5, 0.25, 0.125)


def test_reversed_cs_is_kappa_to_the_power_n_minus_i_plus_1():
    assert ConstantScaling(0.5, reverse=True).coefficients(3) == (0.125, 0.25, 0.5)


def test_uniform_scaling_defaults_to_one_over_root_two():
    assert UniformScaling().coefficients(2) == pytest.approx((1 / math.sqrt(2),) * 2, rel=1e-15)


def test_no_scaling_is_ones_and_explicit_scaling_is_its_list():
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


def test_explicit_scaling_of_the_wrong_length_names_both_lengths():
    with pytest.raises(UnsupportedNetworkError, match=r"2.*3"):
        ExplicitScaling([1, 1]).coefficients(3)


# --------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("kappa", [0, -0.5, math.nan, math.inf, "0.5", None, True, [0.5]])
def test_a_kappa_that_is_not_a_positive_number_is_rejected(kappa):
    with pytest.raises(InvalidValueError, match="kappa"):
        ConstantScaling(kappa)


@pytest.mark.parametrize("value", [0, -1, math.nan, "x"])
def test_a_uniform_value_that_is_not_a_positive_number_is_rejected(value):
    with pytest.raises(InvalidValueError, match="value"):
        UniformScaling(value)


@pytest.mark.parametrize("coefficients", [[], [1, math.nan], [1, "x"], "0.5", 3, None])
def test_coefficients_that_are_not_a_list_of_numbers_are_rejected(coefficients):
    with pytest.raises(InvalidValueError, match="coefficients"):
        ExplicitScaling(coefficients)


def test_kappa_above_one_is_allowed_with_a_warning():
    with pytest.warns(ScalingWarning, match="1.2"):
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
def test_an_invalid_option_of_ls_is_rejected_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidValueError, match=f"{name}.*{value}"):
        LearnableScaling(**options)


@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_an_invalid_number_of_skips_is_rejected(n):
    with pytest.raises(InvalidValueError, match=f"number of long skips.*{n}"):
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
    again = Scaling.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert parse_scaling(spec.to_dict()) == parse_scaling(spec) == spec
    assert hash(spec) == hash(again)


@given(kappa=st.floats(1e-6, 1.0), reverse=st.booleans())
def test_json_keeps_kappa_to_the_last_bit(kappa, reverse):
    spec = ConstantScaling(kappa, reverse)
    assert Scaling.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


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
    with pytest.raises(UnknownNameError, match="did you mean 'uniform'"):
        parse_scaling("unifrom")
    with pytest.raises(UnknownNameError, match="did you mean 'kappa'"):
        parse_scaling("cs", kapa=0.5)
    with pytest.raises(InvalidValueError, match="kappa.*'cs'"):
        parse_scaling("cs")


@pytest.mark.parametrize(
    "bad", [[], 3, "cs", {"kind": 3}, {"kappa": 0.5}, {"kind": "cs", "kappa": None}, {"kind": "cs-reverse", "kappa": 1}]
)
def test_an_invalid_dict_is_rejected(bad):
    with pytest.raises(InvalidValueError):
        Scaling.from_dict(bad)


@pytest.mark.parametrize("scaling", [3, 0.7, ["cs"], object(), ConstantScaling])
def test_anything_but_a_scaling_is_rejected(scaling):
    with pytest.raises(InvalidValueError, match="scaling"):
        parse_scaling(scaling)


def test_options_without_a_name_are_rejected():
    with pytest.raises(InvalidValueError, match="kappa"):
        parse_scaling(ConstantScaling(0.7), kappa=0.5)


def test_labels_are_short_and_show_what_differs_from_the_default():
    labels = {
        "none": NoScaling(),
        "uniform": UniformScaling(),
        "uniform-0.9": UniformScaling(0.9),
        "cs-0.7": ConstantScaling(0.7),
        "cs-reverse-0.7": ConstantScaling(0.7, reverse=True),
        "ls": LearnableScaling(),
        "ls-calibration-ie-shared-False": LearnableScaling("ie", shared=False),
        "ls-reduction-4-activation-mish": LearnableScaling(reduction=4, activation="mish"),
        "explicit-1-0.5": ExplicitScaling([1, 0.5]),
        "stable-0.1": StableScaling(),
        "rezero": ReZeroScaling(),
    }
    assert {label: spec.label for label, spec in labels.items()} == {label: label for label in labels}


# ------------------------------------------------------------------------------------------------ behaviour


def test_learned_scalings_have_no_coefficients_and_block_scalings_leave_the_skips_alone():
    assert LearnableScaling().coefficients(3) is None
    for spec in (StableScaling(), ReZeroScaling()):
        assert spec.acts_on == "blocks"
        assert spec.coefficients(3) == (1.0, 1.0, 1.0)
    assert [spec.kind for spec in SPECS if spec.is_identity] == ["none"]


@given(n=st.integers(1, 30), kappa=st.floats(0.3, 1.0), reverse=st.booleans())
def test_geometric_scalings_equal_their_coefficients(n, kappa, reverse):
    for spec in (NoScaling(), UniformScaling(kappa), ConstantScaling(kappa, reverse)):
        log_a, log_r = spec.geometric(n)
        expected = [math.exp(log_a + (i - 1) * log_r) for i in range(1, n + 1)]
        assert spec.coefficients(n) == pytest.approx(expected, rel=1e-9)
    assert ExplicitScaling([1.0] * n).geometric(n) is None


def test_specs_report_a_skip_that_is_almost_cut_and_a_sum_outside_the_range():
    levels = [notice.level for notice in ConstantScaling(0.5).notices(12)]
    assert levels == [notice.level for notice in kappa_notices(ConstantScaling(0.5).coefficients(12), 0.5)]
    assert "warning" in levels
    assert [notice.level for notice in UniformScaling(0.3).notices(6)] == ["info"]
    assert NoScaling().notices(12) == LearnableScaling().notices(12) == []


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8, 13, 40])
def test_the_kappa_that_a_notice_proposes_raises_no_notice(n, reverse):
    (notice,) = (one for one in ConstantScaling(0.05, reverse=reverse).notices(n + 1) if one.level == "warning")
    proposed = float(re.search(r"kappa >= ([\d.]+)", notice.text)[1])
    assert not [one for one in ConstantScaling(proposed, reverse=reverse).notices(n + 1) if one.level == "warning"]
    below = ConstantScaling(proposed - 0.01, reverse=reverse).notices(n + 1)
    assert [one for one in below if one.level == "warning"]  # and no larger than needed


def test_a_subclass_with_a_kind_is_a_scaling_everywhere():
    """One class definition is all that a new scaling needs."""

    @dataclass(frozen=True)
    class HalfScaling(FixedScaling):
        kind: ClassVar[str] = "half"

        def coefficients(self, n):
            return (0.5,) * n

    try:
        assert "half" in scaling_names()
        assert parse_scaling("half") == Scaling.from_dict(HalfScaling().to_dict()) == HalfScaling()
        assert HalfScaling().label == "half"
    finally:
        del _REGISTRY["half"]


def test_specs_do_not_import_torch():
    code = "import sys; from scalelong.scaling import ConstantScaling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_saved_ls_of_earlier_versions_is_the_papers_form():
    saved = {"kind": "ls", "calibration": "se", "reduction": 16, "activation": "relu", "shared": True, "gate": None,
             "init": "paper"}  # fmt: skip
    spec = Scaling.from_dict(saved)
    assert spec == LearnableScaling(activation="relu")
    assert spec.label == "ls-activation-relu"
    assert LearnableScaling().label == "ls"


# ------------------------------------------------------------------------------------------------- short forms


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("cs:0.5", ConstantScaling(0.5)),
        ("cs-reverse:0.5", ConstantScaling(0.5, reverse=True)),
        ("uniform:0.9", UniformScaling(0.9)),
        ("stable:0.3", StableScaling(0.3)),
        ("explicit:1,0.7,0.5", ExplicitScaling([1, 0.7, 0.5])),
        ("explicit:1", ExplicitScaling([1])),
    ],
)
def test_a_short_form_sets_the_value(text, spec):
    assert parse_scaling(text) == spec


@pytest.mark.parametrize("text", ["ls:0.5", "none:1", "cs:", "cs:a", "cs:0.5,0.7", "explicit:", "cs:-1", "cs:nan"])
def test_a_wrong_short_form_is_rejected(text):
    with pytest.raises(InvalidValueError):
        parse_scaling(text)


def test_a_value_is_given_once():
    with pytest.raises(InvalidValueError, match="'cs:0.5'"):
        parse_scaling("cs:0.5", kappa=0.7)
