"""What a comparison is made of, and what it refuses before anything starts."""

from __future__ import annotations

import json

import pytest

from scalelong.errors import ScaleLongError
from scalelong.experiments.plan import Variant, parse_seeds, plan, scaling_variants
from scalelong.experiments.slots import make_slots
from scalelong.training.presets import preset


def test_scalings_by_name_with_kappa_for_cs_alone():
    variants = scaling_variants("digits", "none, uniform ,cs,cs-reverse,ls,cs:0.5,uniform:0.6", kappa=0.8, steps=7)
    assert [v.name for v in variants] == ["none", "uniform", "cs-0.8", "cs-reverse-0.8", "ls", "cs-0.5", "uniform-0.6"]
    assert variants[1].config.scaling.value == 2**-0.5  # κ is CS's; "uniform" stays the paper's 1/√2
    assert {v.config.train.steps for v in variants} == {7}


def test_cs_without_kappa_takes_the_presets():
    (variant,) = scaling_variants("digits", "cs")
    assert variant.config.scaling.kappa == preset("digits").kappa


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("none,cx", "did you mean 'cs'"),
        ("none,cs,cs", "named twice"),
        ("", "at least one"),
        ("cs:abc", "'abc' is not a number"),
        ("ls:0.5", "not with 'ls'"),
        ("cs:0", "kappa.*0"),
    ],
)
def test_bad_scalings_get_a_sentence(words, said):
    with pytest.raises(ScaleLongError, match=said):
        scaling_variants("digits", words)


def test_a_seed_among_the_settings_is_refused():
    with pytest.raises(ScaleLongError, match="from --seeds"):
        scaling_variants("digits", "none", settings=["train.lr=0.1", "seed=3"])


def test_seeds_are_a_number_of_them_or_themselves():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("4, 7") == (4, 7)
    assert parse_seeds("5,") == (5,)
    assert parse_seeds("1,1") == (1,)
    for bad in ("0", "x", "-1", "", "1.5"):
        with pytest.raises(ScaleLongError, match="--seeds"):
            parse_seeds(bad)


def test_every_seed_is_a_whole_comparison_before_the_next_begins(tmp_path):
    variants = scaling_variants("digits", "none,cs")
    jobs = plan(variants, (0, 3), tmp_path)
    assert [job.name for job in jobs] == ["none-seed0", "cs-0.7-seed0", "none-seed3", "cs-0.7-seed3"]
    assert [job.config.seed for job in jobs] == [0, 0, 3, 3]
    assert jobs[3].folder == tmp_path / "cs-0.7-seed3"


def test_a_name_cannot_leave_the_folder():
    with pytest.raises(ScaleLongError, match="letters"):
        Variant("../x", preset("digits"))


def record(folder, config, step=None):
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": config.to_dict()}))
    if step is not None:
        (folder / "model" / "step.json").write_text(json.dumps({"step": step}))


def test_a_folder_of_other_settings_is_refused_at_once(tmp_path):
    (before,) = scaling_variants("digits", "none", settings=["train.lr=0.5"])
    record(tmp_path / "none-seed0", before.config)
    with pytest.raises(ScaleLongError, match=r"none-seed0 was started with other settings: train.lr: 0.5 → 0.001"):
        plan(scaling_variants("digits", "none"), (0,), tmp_path)


def test_a_run_that_is_longer_than_asked_is_refused(tmp_path):
    (variant,) = scaling_variants("digits", "none", steps=50)
    record(tmp_path / "none-seed0", variant.config, step=80)
    with pytest.raises(ScaleLongError, match="80 steps already, more than 50"):
        plan((variant,), (0,), tmp_path)


@pytest.fixture
def _no_thread_limit(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("_no_thread_limit")
def test_cores_are_shared_out_and_never_more_than_there_are():
    for cores, jobs, asked, slots, threads in [
        (2, 12, None, 2, 1), (2, 1, None, 1, 2), (8, 3, None, 3, 2), (8, 12, 2, 2, 4), (2, 12, 5, 5, 1),
        (1, 4, None, 1, 1),
    ]:  # fmt: skip
        found = make_slots(jobs, asked, gpus=[], cores=cores)
        assert len(found) == slots
        assert {slot.environment["OMP_NUM_THREADS"] for slot in found} == {str(threads)}


def test_the_users_own_thread_limit_holds(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert make_slots(1, gpus=[], cores=8)[0].environment["OMP_NUM_THREADS"] == "1"


def test_each_gpu_has_one_job():
    found = make_slots(12, gpus=["0", "1", "GPU-abc"], cores=8)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in found] == ["0", "1", "GPU-abc"]
    assert len(make_slots(2, gpus=["0", "1", "2"], cores=8)) == 2
    doubled = make_slots(12, 4, gpus=["5", "7"], cores=8)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in doubled] == ["5", "7", "5", "7"]


def test_no_jobs_at_a_time_is_refused():
    with pytest.raises(ScaleLongError, match="--jobs is at least 1"):
        make_slots(3, 0, gpus=[], cores=2)
