"""Comparisons: evaluations are ranked only if their cards allow it."""

import pytest
import torch
from small_pictures import pictures
from torch import nn

from scalelong.errors import EvaluationError, InvalidValueError, UnknownNameError
from scalelong.evaluation import Generation, ModuleExtractor, compare, evaluate_images, images_reference


@pytest.fixture
def other():
    return pictures(60, seed=1, high=200)


@pytest.fixture
def evaluations(extractor, other):
    target = images_reference(other, extractor, name="others")
    made = {"sampler": "ddim", "evaluations": 50, "guidance": 1.0, "ema": 0.999}

    def evaluation(seed=0, n=50, low=0, reference=target, network=extractor, **changes):
        generation = Generation(**{**made, **changes})
        return evaluate_images(pictures(n, seed=seed, low=low), reference, network, generation=generation)

    return evaluation


def test_like_is_ranked_with_like(evaluations):
    comparison = compare({"near": evaluations(), "far": evaluations(low=120, step=7)})
    assert comparison.ranking == ("near", "far")
    assert [remark.field for remark in comparison.remarks] == ["step"]
    assert comparison.overlapping == ()
    comparison.require()
    assert compare({"a": evaluations(0), "b": evaluations(5)}).overlapping


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 49}, "n"),
        ({"sampler": "ddpm"}, "sampler"),
        ({"evaluations": 49}, "evaluations"),
        ({"guidance": 2.0}, "guidance"),
        ({"ema": 0.0}, "ema"),
    ],
)
def test_what_differs_is_named_and_not_ranked(evaluations, change, field):
    comparison = compare({"a": evaluations(), "b": evaluations(**change)})
    assert [difference.field for difference in comparison.differences] == [field]
    assert not comparison.comparable
    assert comparison.ranking == ()
    with pytest.raises(EvaluationError, match=rf"differ in {field} \(.* in a, .* in b"):
        comparison.require()


def test_another_reference_extractor_or_resize_is_not_ranked(evaluations, extractor, other):
    shorter = images_reference(other[:50], extractor, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=shorter)}).differences
    assert [difference.field for difference in differences] == ["reference", "n of the reference"]
    torch.manual_seed(3)
    stranger = ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small", resize="another")
    against = images_reference(other, stranger, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=against, network=stranger)}).differences
    assert [difference.field for difference in differences] == ["weights", "resize"]


def test_a_reference_by_another_name_is_the_same_reference(evaluations, extractor, other):
    renamed = images_reference(other[::-1].copy(), extractor, name="the same in another order")
    assert compare({"a": evaluations(), "b": evaluations(reference=renamed)}).comparable


def test_what_the_comparison_is_about_may_vary(evaluations):
    pair = {"a": evaluations(), "b": evaluations(sampler="ddpm")}
    comparison = compare(pair, vary=["sampler"])
    assert comparison.comparable
    assert [remark.field for remark in comparison.remarks] == ["sampler"]
    with pytest.raises(InvalidValueError, match="'n'"):
        compare(pair, vary=["n"])
    with pytest.raises(UnknownNameError, match="samplr.*sampler"):
        compare(pair, vary=["samplr"])
    with pytest.raises(EvaluationError, match="at least 2"):
        compare({"a": pair["a"]})
