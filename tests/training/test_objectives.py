"""Runs of every objective: they train, remember, resume, sample, evaluate and export."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from scalelong._objectives import OBJECTIVES
from scalelong.errors import InvalidValueError, RunError
from scalelong.experiments.robustness import measure_run_robustness
from scalelong.models.pipeline import ScaleLongPipeline
from scalelong.runs.config import Config, override
from scalelong.runs.generate import Request
from scalelong.runs.run import load_run
from scalelong.training.loop import train
from scalelong.training.presets import PRESETS, choose, default_out, preset
from scalelong.training.start import start_from
from tiny_runs import losses, tiny_config

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of six steps per objective, with classes, dropped labels and the monitor on."""
    folder = tmp_path_factory.mktemp("objectives")
    for name in OBJECTIVES:
        train(config(name), folder / name, quiet=True)
    return folder


def config(name, **settings):
    values = {"diffusion__objective": name, "monitor__every": 3, "data__classes": True, "diffusion__drop": 0.2}
    return tiny_config(**values, **settings)


# ---------------------------------------------------------------------------------------------------- config


def test_presets_of_the_paper_predict_noise_as_before():
    for name, entry in PRESETS.items():
        if entry.size != "paper":
            continue
        diffusion = entry.config.diffusion
        assert diffusion.objective == diffusion.target == "eps", name
        assert (diffusion.times, diffusion.weight, diffusion.precondition) == ("uniform", "one", "none")
    assert preset("digits").diffusion.process == "sd"
    assert preset("cifar10-uvit-s").diffusion.process == "vp"


def test_an_objective_is_a_bundle_whose_parts_can_be_replaced():
    digits = choose("digits", objective="v").diffusion
    assert (digits.process, digits.target) == ("sd", "v")  # keeps the preset's variance-preserving process
    flow = choose("digits", objective="flow").diffusion
    assert (flow.process, flow.target, flow.objective) == ("linear", "flow", "flow")
    edm = choose("digits", objective="edm", settings=["diffusion.sigma_max=40", "diffusion.p_mean=-0.4"]).diffusion
    assert (edm.process, edm.target, edm.times, edm.weight, edm.precondition) == (
        "edm",
        "x0",
        "log-normal",
        "edm",
        "edm",
    )
    assert (edm.sigma_max, edm.p_mean) == (40.0, -0.4)
    mixed = choose(
        "digits", objective="flow", settings=["diffusion.target=x0", "diffusion.times=logit-normal"]
    ).diffusion
    assert (mixed.process, mixed.objective, mixed.times) == ("linear", "x0", "logit-normal")
    assert choose("digits", settings=["diffusion.objective=flow"]).diffusion == flow
    plain = choose("digits", objective="edm", settings=["diffusion.precondition=none"]).diffusion
    assert (plain.process, plain.objective, plain.precondition, plain.weight) == ("edm", "x0", "none", "edm")
    assert override(choose("digits", objective="flow"), {"diffusion.objective": "eps"}).diffusion.process == "vp"


def test_a_sampler_of_vp_alone_is_replaced_with_the_process():
    assert choose("cifar10-uvit-s").sample.sampler == "euler-maruyama"
    assert choose("cifar10-uvit-s", objective="v").sample.sampler == "euler-maruyama"
    assert choose("cifar10-uvit-s", objective="flow").sample.sampler == "dpm-solver++"


def test_a_config_file_may_name_an_objective(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("preset: digits\ndiffusion: {objective: edm, sigma_data: 0.8}\n", encoding="utf-8")
    begun = start_from(None, file).config
    assert (begun.diffusion.process, begun.diffusion.precondition, begun.diffusion.sigma_data) == ("edm", "edm", 0.8)
    assert Config.from_dict(json.loads(begun.to_json())) == begun


def test_an_objective_of_its_own_stands_in_the_name_of_the_folder():
    assert default_out(choose("digits", scaling="cs")).name == "digits-cs-0.7-seed0"
    assert default_out(choose("digits", scaling="cs", objective="flow")).name == "digits-flow-cs-0.7-seed0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"diffusion.objective": "velocity"}, "diffusion.objective.*velocity"),
        ({"diffusion.target": "score"}, "diffusion.target"),
        ({"diffusion.sigma_data": 0.7}, "sigma_data has no effect.*precondition=edm"),
        ({"diffusion.snr_gamma": 3}, "snr_gamma has no effect.*min-snr"),
        ({"diffusion.objective": "edm", "diffusion.sigma_max": 0.001}, "sigma_min < diffusion.sigma_max"),
        ({"diffusion.objective": "edm", "diffusion.sigma_min": -1}, "sigma_min.*> 0"),
        ({"diffusion.objective": "edm", "diffusion.target": "v"}, "target.*x0.*precondition"),
    ],
)
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(InvalidValueError, match=message):
        override(preset("digits"), settings)


# ------------------------------------------------------------------------------------------------------ runs


@every_objective
def test_a_run_remembers_its_objective_and_its_losses_are_finite(runs, name):
    run = load_run(runs / name)
    assert run.config.diffusion.objective == run.objective.name == name
    assert all(np.isfinite(loss) for _, loss, _ in losses(runs / name))
    assert run.column("val_loss").last > 0
    assert run.stability is not None


@every_objective
def test_resuming_equals_the_uninterrupted_run(runs, name, tmp_path):
    train(config(name, train__steps=4), tmp_path / "run", quiet=True)
    train(config(name), tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run") == losses(runs / name)


def test_a_resumed_run_refuses_another_objective(runs):
    with pytest.raises(RunError, match="diffusion.objective: 'flow' → 'v'"):
        train(config("v"), runs / "flow", quiet=True)
    with pytest.raises(RunError, match="diffusion.times: 'uniform' → 'logit-normal'"):
        train(config("flow", diffusion__times="logit-normal"), runs / "flow", quiet=True)


@pytest.mark.filterwarnings("ignore:8 images are too few:scalelong.errors.EvaluationWarning")
@every_objective
def test_samples_with_guidance_and_the_evaluation_card(runs, name):
    run = load_run(runs / name)
    for sampler in ("dpm-solver++", "EulerDiscreteScheduler"):
        images = np.concatenate(list(run.generate(Request(n=4, sampler=sampler, steps=5, guidance=2.0))))
        assert images.shape == (4, 8, 8, 1)
    card = run.evaluate(Request(n=8, sampler="ddim", steps=3), extractor="pixels").card
    assert card.generation.objective == name


@every_objective
def test_robustness_knows_the_objective(runs, name):
    result = measure_run_robustness(load_run(runs / name), images=8, draws=1, bins=2, points=0, samples=0)
    assert result.objective == result.to_dict()["objective"] == name
    assert all(np.isfinite(row.overall.loss) for row in result.sensitivity)


NEW_PROCESS = """
import sys, torch
from scalelong.models.pipeline import ScaleLongPipeline
for folder, out in zip(sys.argv[1::2], sys.argv[2::2]):
    pipe = ScaleLongPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    images = pipe(2, 4, torch.Generator().manual_seed(3), class_labels=[1, 2], output_type="pt").images
    torch.save((pipe.trained_objective.name, images), out)
"""


def test_exported_pipelines_record_the_objective_and_sample_the_same_in_a_new_process(runs, tmp_path):
    arguments, expected = [], {}
    for name in OBJECTIVES:
        run = load_run(runs / name)
        assert json.loads((run.model_path / "model_index.json").read_text())["objective"]["name"] == name
        pipe = run.pipeline()
        pipe.set_progress_bar_config(disable=True)
        pipe.save_pretrained(tmp_path / name)
        expected[name] = pipe(2, 4, torch.Generator().manual_seed(3), class_labels=[1, 2], output_type="pt").images
        arguments += [str(tmp_path / name), str(tmp_path / f"{name}.pt")]
        assert ScaleLongPipeline.from_pretrained(run.model_path).trained_objective == run.objective
    subprocess.run([sys.executable, "-c", NEW_PROCESS, *arguments], check=True)
    for name in OBJECTIVES:
        recorded, images = torch.load(tmp_path / f"{name}.pt")
        assert recorded == name
        assert torch.equal(images, expected[name])


def test_the_pipeline_of_flow_matching_takes_diffusers_own_scheduler(runs):
    import diffusers

    pipe = load_run(runs / "flow").pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    assert pipe(2, 4, class_labels=[1, 2], output_type="pt").images.isfinite().all()
    pipe.scheduler = diffusers.EDMEulerScheduler()
    with pytest.raises(InvalidValueError, match="EDMEulerScheduler.*'edm'.*'linear'"):
        pipe(2, 4, class_labels=[1, 2])
