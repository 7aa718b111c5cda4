"""Comparisons: evaluations are ranked only if their cards allow it."""

from dataclasses import replace

import pytest
import torch
from small_pictures import pictures
from torch import nn

from scalelong.errors import EvaluationError, InvalidValueError, UnknownNameError
from scalelong.evaluation import METRICS, Generation, ModuleExtractor, compare, evaluate_images, images_reference


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


def test_evaluations_with_equal_cards_are_ranked(evaluations):
    comparison = compare({"near": evaluations(), "far": evaluations(low=120, step=7)})
    assert comparison.ranking == ("near", "far")
    assert list(comparison.remarks) == ["step"]
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
def test_a_difference_is_named_and_rules_out_a_ranking(evaluations, change, field):
    comparison = compare({"a": evaluations(), "b": evaluations(**change)})
    assert list(comparison.differences) == [field]
    assert not comparison.comparable
    assert comparison.ranking == ()
    with pytest.raises(EvaluationError, match=rf"differ in {field} \(.* in a, .* in b"):
        comparison.require()


def test_another_reference_extractor_or_resize_is_not_ranked(evaluations, extractor, other):
    shorter = images_reference(other[:50], extractor, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=shorter)}).differences
    assert list(differences) == ["reference", "n of the reference"]
    torch.manual_seed(3)
    different = ModuleExtractor(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), "small", resize="another")
    against = images_reference(other, different, name="others")
    differences = compare({"a": evaluations(), "b": evaluations(reference=against, network=different)}).differences
    assert list(differences) == ["weights", "resize"]


def test_a_reference_by_another_name_is_the_same_reference(evaluations, extractor, other):
    renamed = images_reference(other[::-1].copy(), extractor, name="the same in another order")
    assert compare({"a": evaluations(), "b": evaluations(reference=renamed)}).comparable


def test_fields_named_by_vary_may_differ(evaluations):
    pair = {"a": evaluations(), "b": evaluations(sampler="ddpm")}
    comparison = compare(pair, vary=["sampler"])
    assert comparison.comparable
    assert list(comparison.remarks) == ["sampler"]
    with pytest.raises(InvalidValueError, match="'n'"):
        compare(pair, vary=["n"])
    with pytest.raises(UnknownNameError, match="samplr.*sampler"):
        compare(pair, vary=["samplr"])
    with pytest.raises(EvaluationError, match="at least 2"):
        compare({"a": pair["a"]})


def test_any_metric_can_rank_and_higher_may_be_better(evaluations, monkeypatch):
    pair = {"near": evaluations(), "far": evaluations(low=120)}
    assert compare(pair, metric="kid").ranking == ("near", "far")
    monkeypatch.setitem(METRICS, "kid", replace(METRICS["kid"], higher_is_better=True))
    assert compare(pair, metric="kid").ranking == ("far", "near")
    with pytest.raises(UnknownNameError, match="recall"):
        compare(pair, metric="recall")
