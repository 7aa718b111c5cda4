"""`--set scaling.…`: the options of a scaling from the command line."""

from __future__ import annotations

import pytest

from scalelong.errors import ScaleLongError
from scalelong.scaling import parse_scaling
from scalelong.training.choose import choose


def test_options_of_a_scaling_are_set_by_their_names() -> None:
    config = choose("digits", scaling="ls", settings=["scaling.reduction=4", "scaling.activation=mish"])
    assert (config.scaling["reduction"], config.scaling["activation"]) == (4, "mish")
    assert parse_scaling(config.scaling).label == "ls-reduction-4-activation-mish"
    assert choose("digits", scaling="stable", settings=["scaling.tau=0.3"]).scaling["tau"] == 0.3


def test_an_option_that_the_scaling_has_not_is_named_with_a_suggestion() -> None:
    with pytest.raises(ScaleLongError, match=r"scaling\.reducton.*did you mean 'scaling\.reduction'"):
        choose("digits", scaling="ls", settings=["scaling.reducton=4"])
    with pytest.raises(ScaleLongError, match=r"scaling\.tau"):
        choose("digits", scaling="none", settings=["scaling.tau=0.3"])


def test_a_value_that_the_scaling_refuses_is_refused() -> None:
    with pytest.raises(ScaleLongError, match="whole number"):
        choose("digits", scaling="ls", settings=["scaling.reduction=four"])
    with pytest.raises(ScaleLongError, match="activation"):
        choose("digits", scaling="ls", settings=["scaling.activation=relish"])
