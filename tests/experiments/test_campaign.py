"""A campaign: plan.toml, the runs that are missing, records, and what they say."""

import json
import math
import re

import numpy as np
import pytest
import torch

from scalelong.errors import ScaleLongError
from scalelong.experiments import compare, scheduler
from scalelong.experiments.campaign import FORMAT, read_plan, run_missing
from scalelong.experiments.campaign_results import Results, page
from scalelong.experiments.campaign_run import Observed, _thin, run_planned
from scalelong.experiments.rounding import Rounding
from scalelong.report.campaign import draw_campaign
from scalelong.report.figures import save_figure
from scalelong.runs.logs import Series
from scalelong.runs.run import Run

PLAN = """
title = "Test"
question = "Does it?"
rule = "as always"
preset = "digits-uvit"
steps = 12
seeds = [0, 1, 2]
settings = ["train.batch_size=4", "monitor.every=1", "validate.n=8", "sample.n=0", "model.embed_dim=16",
            "model.depth=4"]

[[arms]]
name = "none"
scaling = "none"

[[arms]]
name = "ls"
scaling = "ls"
group = 2

[[arms]]
name = "cs"
scaling = "cs:0.5"
"""
MEASURED = "[distance]\nevery = 0\nn = 0\nfinal = 8\nevaluations = 2\n"
TUNED = PLAN.replace("[[arms]]", "[tuning]\nlr = [1e-3, 1e-2]\nsteps = 4\nseed = 9\n\n[[arms]]", 1)


@pytest.fixture
def make_plan(tmp_path):
    def make(text=PLAN):
        (tmp_path / "demo").mkdir(exist_ok=True)
        (tmp_path / "demo" / "plan.toml").write_text(text)
        return read_plan(tmp_path / "demo")

    return make


def write_record(plan, name, arm, seed, norm=10.0, loss=0.5, failure=None, lr=0.001, steps=12):
    norms = {"norm": [norm] * 2, "absolute_oscillation": [0.1 * norm] * 2, "relative_oscillation": [0.01] * 2}
    norms |= {"steps": [1, 2], "smooth": [[norm, norm]] * 2, "raw": [[norm, norm]] * 2}
    values = {"norm_outer": norm, "growth_outer": 0.5, "norm_inner": norm, "val_loss_ema": loss}
    config = plan.config(plan.arm(arm), seed, lr, steps).to_dict()
    curves = {"val_loss_ema": {"steps": [1, 12], "values": [1.0, loss]}}
    record = {"arm": arm, "seed": seed, "failure": failure, "values": values, "curves": curves}
    record |= {"optimizer": "adamw", "rounding": None, "distance": None, "alarms": 2, "format": FORMAT}
    (plan.folder / f"{name}.json").write_text(json.dumps(record | {"norms": {"backbone": norms}, "config": config}))


def test_pairs_with_the_baseline_come_first_and_runs_with_a_record_are_skipped(make_plan, tmp_path):
    plan = make_plan()
    assert plan.planned == (
        "none-seed0", "cs-seed0", "none-seed1", "cs-seed1", "none-seed2", "cs-seed2",
        "ls-seed0", "ls-seed1", "ls-seed2",
    )  # fmt: skip
    write_record(plan, "none-seed0", "none", 0)
    assert [job.name for job in plan.missing(tmp_path)][:2] == ["cs-seed0", "none-seed1"]


def test_an_arm_is_tuned_at_the_same_learning_rates_before_its_runs(make_plan, tmp_path):
    plan = make_plan(TUNED)
    names = [job.name for job in plan.missing(tmp_path)]
    assert names == [f"tune-{arm}-lr{lr}-seed9" for arm in ("none", "cs") for lr in ("0.001", "0.01")]
    write_record(plan, "tune-cs-lr0.001-seed9", "cs", 9, loss=0.6, steps=4)
    write_record(plan, "tune-cs-lr0.01-seed9", "cs", 9, loss=0.4, lr=0.01, steps=4)
    own = [job for job in plan.missing(tmp_path) if job.record["arm"] == "cs"]
    assert [job.name for job in own] == ["cs-seed0", "cs-seed1", "cs-seed2"]
    assert all(job.config.train.lr == 0.01 for job in own)
    for lr in ("0.001", "0.01"):
        write_record(plan, f"tune-none-lr{lr}-seed9", "none", 9)
    names = [job.name for job in plan.missing(tmp_path)]
    assert names[:6] == list(plan.planned[:6]), "the next group is tuned after the first one"
    assert names[6:] == ["tune-ls-lr0.001-seed9", "tune-ls-lr0.01-seed9"]


def test_chosen_arms_are_tuned_and_run_without_waiting_for_the_others(make_plan, tmp_path):
    plan = make_plan(TUNED)
    assert [job.name for job in plan.missing(tmp_path, ["ls"])] == ["tune-ls-lr0.001-seed9", "tune-ls-lr0.01-seed9"]
    for lr in (0.001, 0.01):
        write_record(plan, f"tune-ls-lr{lr:g}-seed9", "ls", 9, lr=lr, steps=4)
    assert [job.name for job in plan.missing(tmp_path, ["ls"])] == ["ls-seed0", "ls-seed1", "ls-seed2"]
    with pytest.raises(ScaleLongError, match="unknown arm 'l'"):
        plan.missing(tmp_path, ["l"])


def test_a_learning_rate_at_which_the_run_failed_is_not_chosen(make_plan):
    plan = make_plan(TUNED)
    write_record(plan, "tune-none-lr0.001-seed9", "none", 9, loss=0.6)
    write_record(plan, "tune-none-lr0.01-seed9", "none", 9, loss=0.1, failure="step 3: not finite")
    assert plan.learning_rate(plan.arm("none")) == 0.001
    write_record(plan, "tune-ls-lr0.01-seed9", "ls", 9, loss=0.7)
    assert plan.learning_rate(plan.arm("ls")) is None
    text = page([Results(plan)])
    assert "validation loss (EMA) after 4 steps" in text
    assert "| none | **0.6** | failed |" in text
    assert "| ls | – | 0.7 |" in text
    assert "| cs |" not in text


def test_records_of_other_steps_or_another_learning_rate_are_refused(make_plan, tmp_path):
    plan = make_plan(TUNED)
    write_record(plan, "none-seed0", "none", 0, lr=0.01)
    make_plan(TUNED)  # not tuned yet: nothing is known of its learning rate
    assert "tune-none-lr0.001-seed9" in [job.name for job in plan.missing(tmp_path)], "runs that exist are tuned too"
    write_record(plan, "tune-none-lr0.001-seed9", "none", 9, loss=0.6, steps=4)
    write_record(plan, "tune-none-lr0.01-seed9", "none", 9, loss=0.4, lr=0.01, steps=4)
    make_plan(TUNED)
    write_record(plan, "tune-none-lr0.001-seed9", "none", 9, loss=0.3, steps=4)
    with pytest.raises(ScaleLongError, match=r"none-seed0.json has other settings .* train.lr: 0.01 → 0.001"):
        make_plan(TUNED)
    with pytest.raises(ScaleLongError, match=r"seed9.json has other settings .* train.steps: 4 → 8"):
        make_plan(TUNED.replace("steps = 4", "steps = 8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"cs:0.5"', '"cs:0.9"'), "scaling.kappa: 0.5 → 0.9"),
        (("batch_size=4", "batch_size=8"), "train.batch_size: 4 → 8"),
        (("validate.n=8", "validate.n=16"), "validate.n: 8 → 16"),
        (("monitor.every=1", "monitor.every=2"), "monitor.every: 1 → 2"),
        (("[[arms]]", "[distance]\nevery = 0\nn = 0\nfinal = 8\nevaluations = 2\n\n[[arms]]"), "distance: None → "),
        (('"cs:0.5"', '"cs:0.5"\noptimizer = "sgd"'), "optimizer: 'adamw' → 'sgd'"),
        (("seeds = [0, 1, 2]", "seeds = [0, 0]"), "different seeds"),
    ],
)
def test_a_plan_that_changed_after_its_runs_is_refused(make_plan, change, message):
    plan = make_plan()
    write_record(plan, "cs-seed0", "cs", 0)
    make_plan()
    with pytest.raises(ScaleLongError, match=message):
        make_plan(PLAN.replace(*change, 1))


def test_an_arm_that_trains_at_no_learning_rate_is_a_result_and_the_others_run(make_plan, tmp_path):
    plan = make_plan(TUNED)
    for lr in (0.001, 0.01):
        write_record(plan, f"tune-cs-lr{lr:g}-seed9", "cs", 9, failure="not finite", lr=lr, steps=4)
    plan = make_plan(TUNED)
    assert plan.untrainable == ["cs"]
    assert {job.record["arm"] for job in plan.missing(tmp_path)} == {"none"}
    assert "cs at none of the plan's learning rates" in Results(plan).state
    assert "| cs | failed | failed |" in page([Results(plan)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rule =", "rules ="), "rules"),
        (('name = "cs"', 'name = "none"'), "different names"),
        (("group = 2", 'baseline = "nine"'), "nine"),
        (("train.batch_size", "train.batchsize"), "train.batch_size"),
        (("seeds = [0, 1, 2]", ""), "missing or wrong entry 'seeds'"),
        (("train.batch_size=4", "train.steps=4"), "settings without train.steps, which steps of the plan gives"),
        (("train.batch_size=4", "seed=50"), "settings without seed, which seeds of the plan gives"),
        (("group = 2", 'settings = ["scaling = none"]'), "settings of ls must be settings without scaling"),
        (("group = 2", "settings = 3"), "settings of ls"),
        (("cs:0.5", "cs:x"), "plan.toml: arm 'cs': "),
        (("steps = 12", 'steps = 12\njudged = ["norm_outr"]'), "norm_outer"),
        (("steps = 12", 'steps = "12"'), "steps must be an integer"),
        (("seeds = [0, 1, 2]", "seeds = 2"), "seeds"),
        (("seeds = [0, 1, 2]", 'seeds = ["a"]'), "seeds"),
        (('name = "cs"', 'name = "../evil"'), "name of an arm"),
        (('name = "cs"', 'name = "tune-cs"'), "name of an arm"),
        (("group = 2", 'optimizer = "sgdd"'), "sgdd.*did you mean 'sgd'"),
        (("group = 2", 'rounding = "fp8"'), "fp8"),
        (("group = 2", "factors = { depth = 2 }"), "factors"),
        (("[[arms]]", "[tuning]\nlr = [1e-3, 1e-3]\nsteps = 4\nseed = 9\n\n[[arms]]"), "tuning.lr"),
        (("[[arms]]", "[tuning]\nlr = [1e-3]\nsteps = 0\nseed = 9\n\n[[arms]]"), "tuning.steps"),
        (("[[arms]]", "[tuning]\nlr = [1e-3]\nsteps = 4\nseed = 1\n\n[[arms]]"), "tuning.seed"),
        (("[[arms]]", "[distance]\nevery = 2\nn = 0\nfinal = 8\nevaluations = 2\n\n[[arms]]"), "distance.n"),
        (("[[arms]]", "[distance]\nevery = 2\nn = 8\nfinal = 8\nevaluations = 0\n\n[[arms]]"), "distance"),
        (
            ("[[arms]]", "[distance]\nevery = 5\nn = 8\nfinal = 8\nevaluations = 2\n\n[[arms]]"),
            "multiple of validate.every",
        ),
        (("[[arms]]", f'{MEASURED}sampler = "foo"\n\n[[arms]]'), "foo"),
        (("[[arms]]", f'{MEASURED}extractor = "pixel"\n\n[[arms]]'), "did you mean 'pixels'"),
        (("group = 2", 'group = "1"'), "group of ls must be an integer"),
        (("group = 2", "factors = 3"), "factors of ls must be a table"),
        (("group = 2", "optimizer = 3"), "optimizer of ls must be a name"),
        (("group = 2", 'settings = "train.lr=1"'), "settings of ls must be a list"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_name_of_what_is_wrong(make_plan, change, message):
    with pytest.raises(ScaleLongError, match=message):
        make_plan(PLAN.replace(*change, 1))


def test_a_record_of_a_run_with_other_steps_is_refused(make_plan):
    plan = make_plan()
    write_record(plan, "cs-seed0", "cs", 0)
    record = json.loads((plan.folder / "cs-seed0.json").read_text())
    (plan.folder / "cs-seed0.json").write_text(json.dumps(record | {"steps": 20}))
    with pytest.raises(ScaleLongError, match="steps that were trained: 20 → 12"):
        make_plan()


@pytest.mark.parametrize("damage", ["<<<<<<< HEAD\n{}", "{}", "[1]", '{"format": 1, "arm": "cs"}', '{"format": 99}'])
def test_a_damaged_record_is_named_and_what_to_do(make_plan, damage):
    plan = make_plan()
    write_record(plan, "cs-seed1", "cs", 1)
    (plan.folder / "cs-seed1.json").write_text(damage)
    with pytest.raises(ScaleLongError, match=r"cs-seed1.json is not a whole record.*delete it to train the run again"):
        make_plan()


def test_a_record_with_words_instead_of_numbers_is_named(make_plan):
    plan = make_plan()
    write_record(plan, "cs-seed1", "cs", 1)
    path = plan.folder / "cs-seed1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"values": record["values"] | {"val_loss_ema": "abc"}}))
    with pytest.raises(ScaleLongError, match=r"cs-seed1.json is not a whole record"):
        make_plan()


def test_a_seed_that_became_nonfinite_leaves_claims_open(make_plan):
    plan = make_plan()
    for seed in range(3):
        write_record(plan, f"none-seed{seed}", "none", seed)
        write_record(plan, f"cs-seed{seed}", "cs", seed, loss=0.4, failure="not finite" if seed == 2 else None)
    verdicts = {v.claim: v.verdict for v in Results(plan).verdicts()}
    assert verdicts["lower validation loss at the end"] == "open (1 became non-finite)"


def test_distances_of_samples_that_are_not_images_have_no_verdict(make_plan):
    plan = make_plan()
    for name, arm, images in (("none", "none", True), ("cs", "cs", False)):
        for seed in range(2):
            write_record(plan, f"{name}-seed{seed}", arm, seed)
            path = plan.folder / f"{name}-seed{seed}.json"
            record = json.loads(path.read_text())
            curves = record["curves"] | {"kid": {"steps": [4, 8], "values": [0.3, 0.1]}}
            values = record["values"] | {"kid": 0.1}
            path.write_text(json.dumps(record | {"images": images, "values": values, "curves": curves}))
    results = Results(plan)
    verdicts = {v.claim: v.verdict for v in results.verdicts()}
    assert verdicts["lower KID at the end"] == "no verdict: the samples are not images"
    assert verdicts["reaches the baseline's KID of step 8 in 1/1.5 of its steps"] == verdicts["lower KID at the end"]
    assert results.effects("kid")["all", "settings"]["cs:0.5"] is None
    assert results.effects("val_loss_ema")["all", "settings"]["cs:0.5"].n == 1
    assert results.without_images == ["cs"]


def test_a_finished_run_leaves_a_record_with_norms_of_every_join_and_block(make_plan, tmp_path):
    plan = make_plan(PLAN.replace('scaling = "cs:0.5"', 'scaling = "cs:0.5"\nrounding = "bf16"'))
    # In a process of its own, which has registered no rounded network yet.
    assert run_missing(plan, tmp_path / "runs", jobs=1, limit=1, quiet=True, arms=["cs"]).failures == ()
    record = plan.record("cs-seed0")
    assert record["steps"] == 12
    assert record["values"]["headroom"] > 1000
    assert record["failure"] is None
    assert record["config"]["scaling"] == {"kind": "cs", "kappa": 0.5, "reverse": False}
    assert {"torch", "scalelong"} <= set(record["versions"])
    assert len(record["norms"]["backbone"]["norm"]) == 2
    assert len(record["norms"]["blocks"]["norm"]) == len(record["norms"]["blocks_names"])
    assert record["values"]["norm_outer"] == pytest.approx(record["norms"]["backbone"]["norm"][0], rel=1e-3)
    assert record["values"]["val_loss_ema"] > 0
    assert "cs-seed0" not in [job.name for job in plan.missing(tmp_path)]


def test_headroom_keeps_the_largest_value_from_before_a_resume(tmp_path):
    net = torch.nn.Linear(1, 1)
    net.register_forward_hook(rounding := Rounding("bf16"))
    run = Run(tmp_path)
    measure = Observed(run, config=None, spec=None)
    rounding.largest = 65_504 / 20
    assert measure(net, 5) == {"headroom": pytest.approx(20)}
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "headroom": 20.0}\n')
    rounding.largest = 65_504 / 30  # a resumed process starts from zero
    assert measure(net, 10) == {"headroom": 20}


def test_stored_curves_have_measured_values_and_means_of_noisy_ones():
    curve = Series(np.arange(1, 401.0), np.arange(400.0))
    assert _thin(curve, noisy=False) == {"steps": list(range(4, 401, 4)), "values": list(range(3, 400, 4))}
    assert _thin(curve, noisy=True)["values"][:2] == [1.5, 5.5]


def test_reference_statistics_are_computed_before_the_runs_that_share_them(make_plan, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    distance = "[distance]\nevery = 0\nn = 0\nfinal = 4\nevaluations = 2\nextractor = 'pixels'\nreference = 'train'\n"
    plan = make_plan(TUNED.replace("[[arms]]", f"{distance}reference_n = 64\n\n[[arms]]", 1))
    for lr in plan.tuning.lr:
        write_record(plan, f"tune-none-lr{lr:g}-seed9", "none", 9)
    started = {}

    def start(jobs, *_):
        started.update({job.name: len(list(tmp_path.rglob("first-64.safetensors"))) for job in jobs})
        return (), None

    assert compare.run_jobs is scheduler.run_jobs  # imported already, so that it does not keep the replacement
    monkeypatch.setattr(scheduler, "run_jobs", start)
    assert run_missing(plan, tmp_path / "runs", quiet=True).signal is None
    assert {"none-seed0", "tune-cs-lr0.001-seed9"} <= set(started)
    assert set(started.values()) == {1}


def test_an_arm_starts_when_its_own_tuning_has_ended(make_plan, tmp_path, monkeypatch):
    plan = make_plan(TUNED)
    seen = []

    def run(jobs, slots, logs, display, more):
        assert len(slots) == 2
        waiting, endings = list(jobs), []
        while waiting:
            seen.append((job := waiting.pop(0)).name)
            write_record(
                plan, job.name, job.record["arm"], job.seed, lr=job.config.train.lr, steps=job.config.train.steps
            )
            endings.append(scheduler.Ending(job, 0))
            waiting += more()
            assert set(display.tasks) == {*seen, *(job.name for job in waiting)}
        return tuple(endings), None

    monkeypatch.setattr(scheduler, "run_jobs", run)
    assert run_missing(plan, tmp_path / "runs", jobs=2, limit=8, quiet=True).signal is None
    assert [name for name in seen if name.startswith("tune")] == seen[:4]
    assert seen[4:] == ["none-seed0", "none-seed1", "none-seed2", "cs-seed0"]


def test_a_run_that_diverges_is_a_result_too(make_plan, tmp_path):
    diverging = PLAN.replace('"train.batch_size=4"', '"train.batch_size=4", "train.lr=1e8", "train.warmup=0"')
    plan = make_plan(diverging.replace('scaling = "cs:0.5"', 'scaling = "cs:0.5"\noptimizer = "sgd"'))
    job = next(job for job in plan.missing(tmp_path) if job.name == "cs-seed0")
    assert run_planned({"config": job.config.to_dict(), "folder": str(job.folder), "record": job.record}) == 0
    assert "finite" in plan.record("cs-seed0")["failure"]
    assert Results(plan).finished == []


def test_verdicts_follow_the_interval_and_the_state_counts_runs(make_plan, tmp_path):
    plan = make_plan()
    for seed in range(3):
        write_record(plan, f"none-seed{seed}", "none", seed, norm=10 + seed)
        write_record(
            plan, f"cs-seed{seed}", "cs", seed, norm=(10 + seed) * (0.5 + 0.01 * seed), loss=0.5 + 0.1 * (seed - 1)
        )
    write_record(plan, "ls-seed0", "ls", 0, norm=5)
    results = Results(plan)
    verdicts = {(v.arm, v.claim): v for v in results.verdicts()}
    outer = verdicts["cs", "smaller norm at the outer joins (Fig. 1)"]
    assert outer.verdict == "agrees"
    assert outer.measured.mean == pytest.approx(0.51, abs=0.001)
    assert verdicts["cs", "lower validation loss at the end"].verdict == "open"
    assert verdicts["ls", "smaller norm at the outer joins (Fig. 1)"].verdict == "open (one pair)"
    assert results.joins()["cs"][0].mean == pytest.approx(0.51, abs=0.001)
    assert results.state.startswith("7 of 9 planned runs are finished: none 3, ls 1, cs 3")
    for name, figure in draw_campaign(results).items():
        save_figure(figure, plan.folder / name)
    text = page([results])
    assert "7 of 9 planned runs" in text
    assert "/norms.png" in text
    assert "/curves.png" in text
    assert "| cs | 3 | 0.001 | 0.5 [0.2516, 0.7484] |" in text  # 0.5 ± t(2) · 0.1/√3
    assert "| claim | ls | cs |" in text
    assert re.search(r"Fig. 1\) \| 0.5 \(n = 1\) \*\*open \(one pair\)\*\* \| 0.5\d+ \[.*\*\*agrees\*\* \|", text)


def test_an_arm_without_a_measure_that_others_have_shows_a_dash(make_plan):
    plan = make_plan()
    write_record(plan, "cs-seed0", "cs", 0)
    write_record(plan, "none-seed0", "none", 0)
    record = json.loads((plan.folder / "none-seed0.json").read_text())
    record["values"]["kid"] = 0.02
    (plan.folder / "none-seed0.json").write_text(json.dumps(record))
    text = page([Results(plan)])
    assert "| none | 1 | 0.001 | 0.02 | 0.5 |" in text
    assert "| cs | 1 | 0.001 | – | 0.5 |" in text


def test_measures_that_the_rule_does_not_judge_are_reported_without_a_verdict(make_plan):
    plan = make_plan(PLAN.replace("steps = 12", 'steps = 12\njudged = ["norm_outer"]'))
    for seed in range(3):
        write_record(plan, f"none-seed{seed}", "none", seed)
        write_record(plan, f"cs-seed{seed}", "cs", seed, norm=5 + 0.1 * seed, loss=0.4)
    verdicts = {verdict.claim: verdict.verdict for verdict in Results(plan).verdicts()}
    assert verdicts.pop("smaller norm at the outer joins (Fig. 1)") == "agrees"
    assert set(verdicts.values()) == {"reported, not judged"}
    assert any("reaches the baseline's" in claim for claim in verdicts)
    text = page([Results(plan)])
    assert re.search(
        r"\| claim \| cs \|\n.+\n.+outer joins \(Fig. 1\) \| \S+ \[.+\] \(n = 3\) \*\*agrees\*\* \|\n", text
    )
    assert re.search(r"\| lower validation loss at the end \| \S+ \[\S+ \S+\] \(n = 3\) \|\n", text)


def test_an_acceleration_that_a_seed_does_not_have_is_a_bound_in_words(make_plan):
    plan = make_plan()
    for seed in range(3):
        write_record(plan, f"none-seed{seed}", "none", seed, loss=0.5)
        write_record(plan, f"cs-seed{seed}", "cs", seed, loss=0.6 if seed else 0.4)
        write_record(plan, f"ls-seed{seed}", "ls", seed, loss=0.6)
    sooner = {v.arm: (v.text, v.verdict) for v in Results(plan).verdicts() if "reaches the baseline's" in v.claim}
    assert sooner["cs"] == ("reached in 1 of 3 (1.18×), below 1.00 in the others", "open")
    assert sooner["ls"] == ("reached in 0 of 3, below 1.00", "disagrees")


def test_a_run_that_became_non_finite_never_reaches_the_baseline(make_plan):
    plan = make_plan(PLAN.replace("seeds = [0, 1, 2]", "seeds = [0, 1, 2, 3]"))
    for seed in range(4):
        write_record(plan, f"none-seed{seed}", "none", seed, loss=0.5)
        write_record(plan, f"cs-seed{seed}", "cs", seed, loss=0.4, failure="not finite" if seed > 1 else None)
        write_record(plan, f"ls-seed{seed}", "ls", seed, failure="not finite")
    sooner = {v.arm: (v.text, v.verdict) for v in Results(plan).verdicts() if "reaches the baseline's" in v.claim}
    assert sooner["cs"] == ("reached in 2 of 4 (1.18×, 1.18×), 2 became non-finite", "open")
    assert sooner["ls"] == ("reached in 0 of 4, 4 became non-finite", "disagrees")


def test_a_distance_that_ends_before_training_is_named_by_its_step(make_plan):
    plan = make_plan()
    for arm in ("none", "cs"):
        write_record(plan, f"{arm}-seed0", arm, 0)
        path = plan.folder / f"{arm}-seed0.json"
        record = json.loads(path.read_text())
        record["curves"]["kid"] = {"steps": [3, 9], "values": [0.2, 0.1]}
        record["values"]["kid"] = -0.001  # unbiased, so it may be negative
        path.write_text(json.dumps(record))
    verdicts = {v.claim: v for v in Results(plan).verdicts()}
    assert "reaches the baseline's KID of step 9 in 1/1.5 of its steps" in verdicts
    assert "reaches the baseline's final validation loss (EMA) in 1/1.5 of its steps" in verdicts
    assert verdicts["lower KID at the end"].text == "no ratio: a value is <= 0"


def test_a_run_that_crashes_is_reported(make_plan, tmp_path):
    plan = make_plan(PLAN.replace("seeds = [0, 1, 2]", "seeds = [0]"))
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "cs-seed0").write_text("a file where a folder should be")
    worked = run_missing(plan, tmp_path / "runs", jobs=1, arms=["cs"], quiet=True)
    assert worked.signal is None
    assert [ending.job.name for ending in worked.failures] == ["cs-seed0"]


def test_effects_of_a_designed_experiment_are_means_over_the_settings_that_have_a_level(make_plan):
    arms = ""
    for depth in (12, 24):
        for batch in (8, 64):
            for name, scaling in (("none", "none"), ("cs", "cs:0.5")):
                arms += (
                    f'\n[[arms]]\nname = "d{depth}-b{batch}-{name}"\nscaling = "{scaling}"\n'
                    f'baseline = "d{depth}-b{batch}-none"\nfactors = {{ depth = {depth}, batch = {batch} }}\n'
                )
    plan = make_plan(PLAN.partition("[[arms]]")[0] + arms)
    for arm in plan.arms:
        ratio = {12: 0.5, 24: 0.8}[arm.factors["depth"]] if arm.scaling != "none" else 1.0
        loss = 0.5 * (0.9 + 0.01 * (arm.factors["batch"] == 8) if ratio == 0.5 else 1.0)
        norm = 7.0 * arm.factors["batch"] ** 2 * ratio
        write_record(plan, f"{arm.name}-seed0", arm.name, 0, norm=norm, loss=loss)
    effects = Results(plan).effects("norm_outer")
    assert effects["depth", "12"]["cs:0.5"].mean == pytest.approx(0.5)
    assert effects["depth", "24"]["cs:0.5"].mean == pytest.approx(0.8)
    assert effects["batch", "8"]["cs:0.5"].mean == pytest.approx((0.5 * 0.8) ** 0.5)
    assert effects["all", "settings"]["cs:0.5"].n == 4
    exponents = Results(plan).exponents("norm_outer")
    assert exponents["depth"]["cs:0.5"].mean == pytest.approx(math.log2(0.8 / 0.5))
    assert exponents["batch"]["cs:0.5"].mean == pytest.approx(0)
    growths = Results(plan).growths("norm_outer")
    assert growths["batch"]["none"].mean == pytest.approx(2)
    assert growths["depth"]["none"].mean == pytest.approx(0)
    assert growths["depth"]["cs:0.5"].mean == pytest.approx(math.log2(0.8 / 0.5))
    assert list(draw_campaign(Results(plan))) == ["effects.png"]
    assert "Norm at the outer joins by level" in page([Results(plan)])
    assert "| cs:0.5 | 4 | 0 | 4 |" in page([Results(plan)])
    assert "| depth | 0.6781 [0.6781, 0.6781] |" in page([Results(plan)])
    assert Results(plan).corners() == {(("depth", "12"), "cs:0.5"): "helps"}
    assert "| cs:0.5 | depth 12 | 0.905 [0.8436, 0.9708] | 0.5 [0.5, 0.5] | **helps** |" in page(
        [Results(plan)]
    )  # t(1) = 12.71


def test_the_middle_blocks_norm_is_that_of_the_last_join(make_plan):
    plan = make_plan()
    for arm, middle in (("none", 5.0), ("cs", 7.5)):
        write_record(plan, f"{arm}-seed0", arm, 0)
        path = plan.folder / f"{arm}-seed0.json"
        record = json.loads(path.read_text())
        record["norms"]["backbone"] |= {"norm": [10.0, middle], "growth": [0.5, None]}
        path.write_text(json.dumps(record))
    results = Results(plan)
    assert results.values("none", "norm_middle") == {0: 5.0}
    assert results.values("cs", "norm_middle") == {0: 7.5}
    assert results.values("cs", "growth_middle") == {}
    assert results.values("cs", "norm_outer") == {0: 10.0}


def test_rounding_keeps_what_bf16_can_represent():
    x = torch.tensor([1.0, 1.001, 3.0e38], requires_grad=True)
    rounding = Rounding("bf16")
    rounded = rounding(None, None, x)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert rounded[0] == 1
    assert rounded[1] != x[1]
    assert rounding.largest == pytest.approx(3e38)
    assert torch.isinf(Rounding("fp16")(None, None, torch.tensor([65_600.0]))).all()
    assert torch.equal(Rounding("fp32")(None, None, x), x)
