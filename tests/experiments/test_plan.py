"""What a comparison trains, and what it rejects before anything starts."""

from __future__ import annotations

import json

import pytest

from scalelong.errors import InvalidValueError, RunError, UnknownNameError
from scalelong.experiments.plan import DistanceSpec, Variant, parse_seeds, plan, scaling_variants
from scalelong.experiments.worker import has_distance
from scalelong.runs.run import Run
from scalelong.training.presets import preset

SAMPLES = ["sample.sampler=dpm-solver++", "sample.steps=2", "sample.clip_denoised=false"]
GENERATION = {"step": 50, "sampler": "dpm-solver++", "evaluations": 2, "guidance": 1.0, "clip_denoised": False}


def test_scalings_by_name_with_kappa_for_cs_alone():
    variants = scaling_variants("digits", "none, uniform ,cs,cs-reverse,ls,cs:0.5,uniform:0.6", kappa=0.8, steps=7)
    assert [v.name for v in variants] == ["none", "uniform", "cs-0.8", "cs-reverse-0.8", "ls", "cs-0.5", "uniform-0.6"]
    assert variants[1].config.scaling.value == 2**-0.5  # κ is CS's; "uniform" stays the paper's 1/√2
    assert {v.config.train.steps for v in variants} == {7}


def test_cs_without_kappa_takes_the_presets():
    (variant,) = scaling_variants("digits", "cs")
    assert variant.config.scaling.kappa == preset("digits").kappa


@pytest.mark.parametrize(
    ("words", "error", "part"),
    [
        ("none,cx", UnknownNameError, "'cx'.*'cs'"),
        ("none,cs,cs", InvalidValueError, "cs-0.7,cs-0.7"),
        ("", InvalidValueError, "none,uniform,cs,ls"),
        ("cs:abc", InvalidValueError, "'cs:abc'"),
        ("cs:0.5,0.7", InvalidValueError, "'cs:0.5,0.7'"),
        ("explicit:1,x", UnknownNameError, "'x'"),
        ("ls:0.5", InvalidValueError, "'ls:0.5'"),
        ("cs:0", InvalidValueError, "kappa.*0"),
    ],
)
def test_invalid_scalings_raise_an_error_that_names_them(words, error, part):
    with pytest.raises(error, match=part):
        scaling_variants("digits", words)


def test_a_seed_among_the_settings_is_rejected():
    with pytest.raises(InvalidValueError, match="--seeds"):
        scaling_variants("digits", "none", settings=["train.lr=0.1", "seed=3"])


def test_seeds_are_a_count_or_a_list():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("4, 7") == (4, 7)
    assert parse_seeds("5,") == (5,)
    assert parse_seeds("1,1") == (1,)
    for bad in ("0", "x", "-1", "", "1.5", "1001", f"{2**63},"):
        with pytest.raises(InvalidValueError, match=f"--seeds.*{bad}"):
            parse_seeds(bad)


def test_all_variants_of_a_seed_come_before_the_next_seed(tmp_path):
    variants = scaling_variants("digits", "none,cs")
    jobs = plan(variants, (0, 3), tmp_path)
    assert [job.name for job in jobs] == ["none-seed0", "cs-0.7-seed0", "none-seed3", "cs-0.7-seed3"]
    assert [job.config.seed for job in jobs] == [0, 0, 3, 3]
    assert jobs[3].folder == tmp_path / "cs-0.7-seed3"


def test_a_name_cannot_leave_the_folder():
    with pytest.raises(InvalidValueError, match="../x"):
        Variant("../x", preset("digits"))


def record(folder, config, step=None):
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": config.to_dict()}))
    if step is not None:
        (folder / "model" / "step.json").write_text(json.dumps({"step": step}))


def test_a_folder_with_other_settings_is_rejected_before_training(tmp_path):
    (before,) = scaling_variants("digits", "none", settings=["train.lr=0.5"])
    record(tmp_path / "none-seed0", before.config)
    with pytest.raises(RunError, match=r"none-seed0.*train.lr: 0.5 → 0.003"):
        plan(scaling_variants("digits", "none"), (0,), tmp_path)


def test_a_run_with_more_steps_than_requested_is_rejected(tmp_path):
    (variant,) = scaling_variants("digits", "none", steps=50)
    record(tmp_path / "none-seed0", variant.config, step=80)
    with pytest.raises(RunError, match="80 steps.*50"):
        plan((variant,), (0,), tmp_path)


def test_a_run_with_another_validation_set_is_rejected(tmp_path):
    (before,) = scaling_variants("digits", "none", settings=["validate.n=64"])
    record(tmp_path / "none-seed0", before.config)
    with pytest.raises(RunError, match=r"measured with other settings: validate.n: 64 → 96"):
        plan(scaling_variants("digits", "none", settings=["validate.n=96"]), (0,), tmp_path)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"extractor": "incepton"}, UnknownNameError),
        ({"n": 1}, InvalidValueError),
        ({"evaluations": 0}, InvalidValueError),
    ],
)
def test_an_invalid_distance_is_rejected(spec, error):
    with pytest.raises(error, match=str(*spec.values())):
        DistanceSpec(**spec)


def test_a_list_of_scalings_may_hold_values_of_its_own():
    variants = scaling_variants("digits", "none,explicit:1,0.7,0.5,cs:0.5,cs,stable:0.3", kappa=0.9)
    assert [variant.name for variant in variants] == [
        "none", "explicit-1-0.7-0.5", "cs-0.5", "cs-0.9", "stable-0.3",
    ]  # fmt: skip


@pytest.mark.parametrize("extractor", ["inception", "inception-pytorch-fid", "pixels", "dinov2", "clip", None])
def test_a_stored_distance_counts_for_its_own_extractor_only(tmp_path, extractor):
    names = {
        "inception": "inception-2015-12-05", "inception-pytorch-fid": "inception-pytorch-fid", "pixels": "8×8 pixels",
        "dinov2": "dinov2 ViT-L/14", "clip": "clip ViT-L/14",
    }  # fmt: skip
    settings = ["evaluate.extractor=inception-pytorch-fid", "train.steps=50", *SAMPLES]
    (variant,) = scaling_variants("digits", "none", settings=settings)
    folder = tmp_path / "run"
    record(folder, variant.config, step=50)
    found = []
    for key, name in names.items():
        card = {"extractor": name, "metric": "FID", "n": 9, "generation": GENERATION}
        (folder / "distance.json").write_text(json.dumps({"card": card}))
        found += [key] if has_distance(Run(folder), DistanceSpec(extractor, 9, 2), variant.config) else []
    assert found == [extractor or "inception-pytorch-fid"]


@pytest.mark.parametrize(
    "setting", ["sample.sampler=ddim", "sample.steps=4", "sample.clip_denoised=true", "train.steps=60"]
)
def test_a_stored_distance_does_not_count_for_other_samples(tmp_path, setting):
    (variant,) = scaling_variants("digits", "none", settings=["train.steps=50", *SAMPLES])
    (other,) = scaling_variants("digits", "none", settings=["train.steps=50", *SAMPLES, setting])
    record(tmp_path, variant.config, step=50)
    card = {"extractor": "8×8 pixels", "n": 9, "generation": GENERATION}
    (tmp_path / "distance.json").write_text(json.dumps({"card": card}))
    spec = DistanceSpec("pixels", 9)
    assert has_distance(Run(tmp_path), spec, variant.config)
    assert not has_distance(Run(tmp_path), spec, other.config)
