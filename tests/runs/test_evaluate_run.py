"""Evaluating a network with its run's config, once and during training."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

from scalelong.data import load
from scalelong.errors import RunError
from scalelong.evaluation import Evaluation, ModuleExtractor, build_extractor
from scalelong.evaluation import extractors as extractors_module
from scalelong.evaluation.memorisation import measure_memorisation
from scalelong.runs import generate as generate_module
from scalelong.runs.generate import Request, drawn_from
from scalelong.training import load_run, override, preset, train
from scalelong.training.examples import Examples

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


# ------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture
def kept(tmp_path):
    """A run with an evaluation at every step, of which the best is kept."""
    settings = {"evaluate.every": 1, "evaluate.n": 20, "evaluate.extractor": "small", "evaluate.keep_best": True}
    config = override(preset("digits-uvit"), {**SMALL, **QUIET, **settings, "train.steps": 4, "checkpoint.every": 1})
    train(config, tmp_path / "run", quiet=True)
    return load_run(tmp_path / "run")


def distances(run):
    files = sorted((run.folder / "evaluations").iterdir())
    return {int(file.stem[5:]): json.loads(file.read_text())["frechet"] for file in files}


def test_the_best_checkpoint_is_kept_and_the_card_says_what_it_is_the_best_of(kept):
    values = distances(kept)
    best = min(values, key=values.get)
    result = kept.evaluate(Request(n=20, steps=3), None, "small", step="best")
    made = result.card.generation
    assert (made.step, made.minimum_over) == (best, 4)
    assert made.selection == "lowest Fréchet distance of small (not FID) of 20 samples"
    assert result.frechet == pytest.approx(values[best])  # the same network, seed and number of samples


def test_a_better_evaluation_of_a_resumed_run_replaces_the_best(kept):
    train(override(kept.config, {"train.steps": 6}), kept.folder, quiet=True)
    values = distances(kept)
    _, selection = load_run(kept.folder).network_at("best")
    assert (selection.step, selection.minimum_over) == (min(values, key=values.get), 6)


def test_a_step_is_evaluated_by_its_number_and_an_absent_one_names_those_that_exist(kept):
    values = distances(kept)
    result = kept.evaluate(Request(n=20, steps=3), None, "small", step=3)
    assert result.frechet == pytest.approx(values[3])
    assert (result.card.generation.step, result.card.generation.selection) == (3, None)
    with pytest.raises(RunError, match="3, 4 or best, got 99"):
        kept.evaluate(Request(n=20, steps=3), None, "small", step=99)


def test_a_run_without_a_best_checkpoint_says_how_to_keep_one(run):
    with pytest.raises(RunError, match=r"got best; evaluate\.every=N with evaluate\.keep_best=true"):
        run.evaluate(Request(n=20, steps=3), None, "small", step="best")


def test_the_reference_is_the_configs(run, tmp_path):
    config = override(run.config, {"evaluate.reference": "validation:40"})
    train(override(config, {"seed": 1}), tmp_path / "other", quiet=True)
    found = load_run(tmp_path / "other").evaluate(Request(n=20, steps=2), extractor="small")
    assert (found.card.reference.split, found.card.reference.n) == ("validation", 40)


def test_the_runs_dataset_by_name_is_read_at_the_runs_image_size(tmp_path):
    size = {"data.image_size": 4, "model.patch_size": 2}
    train(override(preset("digits-uvit"), {**SMALL, **QUIET, **size}), tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run")
    found = run.evaluate(Request(n=20, steps=2), "digits:validation:40", "small")
    assert found.card.image == found.card.reference.image == (4, 4, 1)
    assert not [note for note in found.card.notes if "those of the reference" in note]


# --------------------------------------------------------------------------------- labels and captions


def test_labels_are_balanced_or_drawn_by_frequency_and_the_card_says_so(tmp_path):
    config = override(preset("digits-uvit-class"), {**SMALL, **QUIET})
    train(config, tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run")
    many = Request(n=3000, labels="frequency", seed=3)
    labels = generate_module._labels(run.config, run.facts, many)
    trained = torch.bincount(torch.from_numpy(load("digits").labels.copy())) / 1497
    torch.testing.assert_close(torch.bincount(labels) / 3000, trained, rtol=0, atol=0.025)  # four standard errors
    part = generate_module._labels(run.config, run.facts, replace(many, first=100, n=50))
    assert torch.equal(part, labels[100:150])
    card = lambda **draws: run.evaluate(Request(n=20, steps=2, **draws), "digits:train:50", "small").card.generation
    assert card().labels == "10 classes in turn"
    assert card(labels="frequency").labels == "10 classes by frequency"


def test_captions_of_held_out_images_are_drawn_at_random_each_image_once_per_round():
    config = preset("shapes")
    data = load("shapes", "validation")
    request = Request(n=len(data), draw_captions=True)
    prompts = generate_module._prompts(config, request)
    assert sorted(prompts) == sorted(data.captions[k] for k in range(len(data)))  # one caption per image here
    assert list(prompts) != [data.captions[k] for k in range(len(data))]
    assert generate_module._prompts(config, replace(request, n=30)) == prompts[:30]
    assert generate_module._prompts(config, replace(request, seed=1)) != prompts
    facts = Examples(config, "train").facts()
    assert drawn_from(config, facts, request) == "captions of shapes (validation), drawn at random"


# ---------------------------------------------------------------------------------------- memorisation


def test_copies_of_training_images_are_found_and_held_out_images_are_not():
    training, held_out = load("digits", "train"), load("digits", "validation")
    copies = measure_memorisation(training.images[100:150], training, held_out, build_extractor("pixels"))
    assert copies.share == 1.0
    assert copies.p_value < 1e-20
    assert {(pair.sample + 100, pair.training) for pair in copies.pairs} == {
        (pair.training, pair.training) for pair in copies.pairs
    }
    others = measure_memorisation(held_out.images[:150], training, held_out.images[150:], build_extractor("pixels"))
    assert others.share == pytest.approx(0.05, abs=0.06)
    assert others.p_value > 0.01
    assert "no sign of copies" in str(others)


def test_a_run_writes_the_sheet_of_the_ten_nearest_pairs(run):
    result = run.memorisation(Request(n=12, steps=2), "pixels")
    assert json.loads((run.folder / "memorisation.json").read_text())["n"] == 12
    with Image.open(run.folder / "memorisation.png") as sheet:
        facts = json.loads(sheet.text["scalelong"])
    assert facts["columns"] == 10
    assert facts["captions"][10] == f"training {result.pairs[0].training}"
    distances = [pair.distance for pair in result.pairs]
    assert distances == sorted(distances)
