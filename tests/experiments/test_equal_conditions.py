"""Variants of one seed start from the same weights and see the same images, times and noise."""

from __future__ import annotations

import pytest
import torch

from scalelong.experiments.plan import plan, scaling_variants
from scalelong.training.examples import Examples
from scalelong.training.trainer import Trainer

SMALL = ["model.embed_dim=32", "model.depth=4", "train.batch_size=8"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    variants = scaling_variants("digits-uvit", "none,uniform,cs,ls", settings=SMALL)
    jobs = plan(variants, (3, 4), tmp_path_factory.mktemp("runs"))
    return {job.name: Trainer(job.config, Examples(job.config, "train")) for job in jobs}


def test_initial_weights_are_the_same_but_for_what_ls_adds(trainers):
    base = trainers["none-seed3"].net.state_dict()
    for name in ("uniform-seed3", "cs-0.7-seed3", "ls-seed3"):
        own = trainers[name].net.state_dict()
        assert set(base) <= set(own)
        for key, weight in base.items():
            assert torch.equal(weight, own[key]), (name, key)
        added = set(own) - set(base)
        assert bool(added) == (name == "ls-seed3")


@pytest.mark.parametrize("step", [1, 500])
def test_batches_times_and_noise_are_the_same(trainers, step):
    base = trainers["none-seed3"].batch(step)
    for name in ("uniform-seed3", "cs-0.7-seed3", "ls-seed3"):
        own = trainers[name].batch(step)
        assert torch.equal(base.x_0, own.x_0)
        assert torch.equal(base.t, own.t)
        assert torch.equal(base.eps, own.eps)


def test_another_seed_differs_in_all_of_them(trainers):
    one, other = trainers["none-seed3"], trainers["none-seed4"]
    assert not torch.equal(one.batch(1).eps, other.batch(1).eps)
    assert not torch.equal(one.batch(1).x_0, other.batch(1).x_0)
    assert any(not torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))


def test_cs_with_kappa_one_has_the_first_losses_of_none(tmp_path):
    losses = {}
    for variant in scaling_variants("digits-uvit", "none,cs:1", settings=SMALL):
        trainer = Trainer(variant.config, Examples(variant.config, "train"))
        losses[variant.name] = [trainer.step().loss for _ in range(3)]
    assert losses["none"] == losses["cs-1"]
