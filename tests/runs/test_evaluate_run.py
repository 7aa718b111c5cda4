"""Evaluating a network with its run's config, once and during training."""

import json

import pytest
import torch
from torch import nn

from scalelong.evaluation import Evaluation, ModuleExtractor
from scalelong.evaluation import extractors as extractors_module
from scalelong.runs.generate import Request
from scalelong.training import load_run, override, preset, train

SMALL = {"train.steps": 2, "train.batch_size": 4, "model.embed_dim": 16, "model.depth": 2, "model.num_heads": 2}
QUIET = {"sample.n": 0, "validate.n": 4, "sample.steps": 3}


@pytest.fixture(autouse=True)
def small_extractor(monkeypatch, tmp_path):
    """An extractor by the name `small`, and a cache of its own for the reference."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))

    def build(weights):
        torch.manual_seed(0)
        return ModuleExtractor(nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU()), "small")

    monkeypatch.setitem(extractors_module.EXTRACTORS, "small", build)


@pytest.fixture
def run(tmp_path):
    config = override(preset("digits-uvit"), {**SMALL, **QUIET})
    train(config, tmp_path / "run", quiet=True)
    return load_run(tmp_path / "run")


def test_a_run_is_measured_against_what_it_was_trained_on(run):
    found = run.evaluate(Request(n=20, steps=3, seed=4), extractor="small", save_as="evaluate")
    assert Evaluation.load(run.folder / "evaluation.json") == found
    made = found.card.generation
    assert (made.sample_seed, made.evaluations, made.step, made.run) == (4, 3, 2, "run")
    reference = found.card.reference
    assert (reference.name, reference.split, reference.n) == ("digits", "train", 1497)
    assert found.card.n == 20


def test_samples_depend_on_the_seed_and_not_on_the_batch(run):
    def content(**changes):
        request = Request(**{"n": 12, "steps": 2, **changes})
        return run.evaluate(request, "digits:train:50", "small").card.content

    assert content(batch_size=5) == content()
    assert content(seed=1) != content()


def test_training_logs_evaluations_and_resumes_with_them(tmp_path):
    settings = {"evaluate.every": 2, "evaluate.n": 20, "evaluate.extractor": "small", "train.log_every": 1}
    config = override(preset("digits-uvit"), {**SMALL, **QUIET, **settings, "train.steps": 3, "checkpoint.every": 1})
    train(config, tmp_path / "run", quiet=True)
    train(override(config, {"train.steps": 5}), tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["frechet"] for line in lines if "frechet" in line}
    assert list(measured) == [2, 3, 4, 5]  # every second step, and the last of each call
    files = sorted((tmp_path / "run" / "evaluations").iterdir())
    assert [file.name for file in files] == [f"step-{step:08d}.json" for step in measured]
    stored = json.loads(files[0].read_text())
    assert (stored["frechet"], stored["card"]["generation"]["step"]) == (measured[2], 2)
    assert "kid" in lines[1]
    assert "fid" not in lines[1]  # not FID, and not called so
    plain = override(config, {"evaluate.every": 0, "train.steps": 5})
    train(plain, tmp_path / "plain", quiet=True)
    others = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert not (tmp_path / "plain" / "evaluations").exists()  # not even after the last step
    assert [line["loss"] for line in others] == [line["loss"] for line in lines]  # evaluation changes nothing
