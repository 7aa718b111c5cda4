"""Successive halving keeps the best candidate with the stated confidence, spends a third of a grid, and resumes."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import scalelong
from scalelong.cli import main
from scalelong.errors import InvalidValueError, RunError
from scalelong.experiments.halving import Score, halve, paired_differences
from scalelong.experiments.scheduler import Ending
from scalelong.experiments.tuning import Budget, _Clock, candidates_of, parse_budget, scores, tune_preset
from scalelong.experiments.worker import is_finished
from scalelong.training import train
from tiny_runs import TINY, tiny_config


def simulate(seed, gap, candidates=8, blocks=3, noise=0.01):
    """Curves with a known order: every candidate is `gap` better than the next; blocks shift all of them alike."""
    random = np.random.default_rng(seed)
    floor = 0.3 + gap * random.permutation(candidates)
    shared = random.normal(0, 0.05, blocks)

    def advance(names, steps):
        noisy = {name: floor[int(name)] + steps**-0.5 + shared + random.normal(0, noise, blocks) for name in names}
        return {name: Score(tuple(values)) for name, values in noisy.items()}

    result = halve([str(k) for k in range(candidates)], advance, steps=1000, blocks=blocks)
    best = str(int(floor.argmin()))
    return not result[best].dropped, result.best == best, result.steps / result.grid_steps


@pytest.mark.parametrize("gap", [0.0, 0.005, 0.03])
def test_the_best_candidate_survives_with_the_stated_confidence(gap):
    survived = [simulate(seed, gap)[0] for seed in range(200)]
    # With equal candidates (gap 0) any of them may be dropped by chance: at most 5 % of the searches, and 3 σ of 200.
    assert np.mean(survived) >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / 200)


def test_clear_differences_are_found_with_a_third_of_the_steps_of_the_grid():
    trials = np.array([simulate(seed, 0.03) for seed in range(100)], dtype=float)
    assert trials[:, 1].mean() >= 0.95
    assert trials[:, 2].mean() <= 1 / 3


def test_a_folder_that_was_trained_further_than_a_rung_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("scalelong.experiments.tuning.trained_steps", lambda run: 9)
    candidates = candidates_of(tiny_config("digits-uvit", train__steps=16), ["scaling"], "none,cs:0.5")
    with pytest.raises(RunError, match=r"was trained for 9 steps .* compares at 2; use another --out"):
        tune_preset(candidates, [0], tmp_path, quiet=True)


def test_with_two_candidates_the_interval_is_the_paired_t_interval():
    a, b = np.array([0.31, 0.35, 0.40, 0.33]), np.array([0.30, 0.33, 0.39, 0.30])
    gap = paired_differences({"a": a, "b": b}, "b", 0.95)["a"]
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx((expected.low, expected.high))


def test_a_candidate_that_fails_is_dropped_and_equal_candidates_tie():
    def advance(names, steps):
        scores = {name: Score((0.3, 0.4 + 1e-6 * int(name))) for name in names}
        return scores | ({"2": Score((), "became non-finite")} if "2" in names else {})

    result = halve(["0", "1", "2"], advance, steps=80, blocks=2)
    assert result["2"].dropped == "became non-finite by step 10"
    assert (result.best, result.tied) == ("0", ("1",))
    assert result.steps == 2 * (3 * 10 + 2 * 70)


def test_a_budget_ends_the_search_before_the_rung_that_would_exceed_it():
    calls = []

    def advance(names, steps):
        calls.append(steps)
        return {name: Score((0.3, 0.31)) for name in names}

    assert halve(["a", "b"], advance, steps=80, budget=40, blocks=1).steps == 40
    assert calls == [10, 20]
    with pytest.raises(InvalidValueError, match="the first rung"):
        halve(["a", "b"], advance, steps=80, budget=19)
    with pytest.raises(InvalidValueError, match="different candidates"):
        halve([], advance, steps=80)
    with pytest.raises(InvalidValueError, match="every candidate failed"):
        halve(["a"], lambda names, steps: {"a": Score((), "became non-finite")}, steps=80)


def test_one_seed_says_nothing_about_ties():
    def advance(names, steps):
        return {name: Score((10.0 ** int(name),)) for name in names}

    result = halve(["0", "1", "2"], advance, steps=80)
    assert (result.best, result.runner_up, result.tied) == ("0", "1", ())


def test_the_best_candidate_does_not_differ_from_itself():
    losses = {"a": (0.30, 0.32, 0.31), "b": (0.31, 0.36, 0.32)}
    gap = paired_differences(losses, "a", 0.95)
    assert (gap["a"].mean, gap["a"].low, gap["a"].high) == (0, 0, 0)
    assert gap["b"].low < 0 < gap["b"].high


def test_a_clock_that_runs_out_ends_the_search_after_the_first_rung():
    def advance(names, steps):
        return {name: Score((0.3, 0.31)) for name in names}

    assert halve(["a", "b"], advance, steps=80, may_start=lambda cost: False).steps == 20
    assert halve(["a", "b"], advance, steps=80, may_start=lambda cost: cost <= 20).steps == 40


def test_the_best_is_compared_at_the_last_step_that_both_reached():
    losses = {"a": (0.30, 0.32, 0.31), "b": (0.31, 0.33, 0.32), "c": (0.5, 0.52, 0.515)}

    def advance(names, steps):
        return {name: Score(tuple(value + 1 / steps for value in losses[name])) for name in names}

    result = halve(list(losses), advance, steps=80, blocks=3)
    assert (result.best, result["c"].steps) == ("a", 10)
    assert result.gap("c").steps == 10
    assert result.gap("c").loss.mean == pytest.approx(0.2017, abs=1e-3)
    assert result.gap("a") is None
    assert result.runner_up == "b"


def outcomes(loss, norm=10.0, alarms=()):
    return [{"loss": loss, "norm": norm, "alarms": list(alarms)} for _ in range(2)]


def test_alarms_and_exploding_norms_drop_a_candidate():
    found = scores({"a": outcomes(0.3), "b": outcomes(0.3, alarms=["loss"]), "c": outcomes(0.3, norm=200.0),
                    "d": outcomes(float("nan")), "e": outcomes(0.4, norm=None)})  # fmt: skip
    failed = {name: score.failed or "" for name, score in found.items()}
    assert failed["a"] == failed["e"] == ""
    assert "alarms (loss)" in failed["b"]
    assert "norms 20 times" in failed["c"]
    assert "non-finite" in failed["d"]


def test_alarms_of_all_candidates_decide_nothing():
    found = scores({"a": outcomes(0.3, alarms=["ratio"]), "b": outcomes(0.4, alarms=["ratio"]), "c": outcomes(None)})
    assert [score.failed for score in found.values()] == [None, None, "became non-finite"]


def test_tune_continues_a_loop_of_your_own_from_its_state():
    calls = []

    def make_run(lr, steps, state):
        calls.append((lr, state, steps))
        curve = [abs(lr - 0.2) + 1 / steps + 0.001 * seed * lr for seed in range(3)]
        return (float("nan") if lr > 1 else curve), steps

    result = scalelong.tune(make_run, {"small": 0.1, "right": 0.2, "huge": 2.0}, steps=80)
    assert result.best == "right"
    assert "non-finite" in result["huge"].dropped
    for lr in (0.1, 0.2):
        states = [(state, steps) for rate, state, steps in calls if rate == lr]
        assert [state for state, _ in states] == [None, *[steps for _, steps in states[:-1]]]


def test_candidates_cover_what_is_searched_and_no_scaling():
    config = tiny_config("digits-uvit", model__depth=12)
    names = [c.name for c in candidates_of(config, ["kappa"])]
    assert names[0] == "none"
    assert len(names) == 5
    rates = candidates_of(config, ["lr"])
    assert [c.config.train.lr / config.train.lr for c in rates] == [0.25, 0.5, 1, 2, 4]
    both = candidates_of(config, ["scaling", "lr"], "none,cs:0.5,ls")
    assert len(both) == 15
    assert {c.config.train.schedule for c in both} == {"constant"}
    with pytest.raises(InvalidValueError, match="depth"):
        candidates_of(config, ["depth"])


@pytest.mark.parametrize(("text", "steps"), [("2000steps", 2000), ("30s", 600), ("2m", 2400), ("0.5h", 36000)])
def test_a_budget_is_a_number_of_steps_or_a_time(text, steps):
    budget = parse_budget(text, lambda: 0.1, jobs=2)
    assert (budget.steps, budget.seconds is None) == (steps, text.endswith("steps"))


def test_a_resumed_search_has_its_time_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("scalelong.experiments.tuning.time.monotonic", lambda: now[0])
    clock = _Clock(60.0)
    now[0] += 50  # finished rungs are read, nothing is trained
    assert clock.allows(10**6)
    clock.count(100)
    now[0] += 20
    assert clock.allows(200)
    assert not clock.allows(201)


@pytest.mark.parametrize("text", ["", "fast", "-3m", "steps", "10"])
def test_another_budget_is_refused(text):
    with pytest.raises(InvalidValueError, match="--budget"):
        parse_budget(text, lambda: 0.1, jobs=1)


def test_the_command_searches_resumes_and_prints_the_command_to_train_with(tmp_path, capsys):
    settings = [f"--set={key}={value}" for key, value in TINY.items() if key not in ("train.steps", "checkpoint.every")]
    command = [
        "tune",
        "digits-uvit",
        "--over",
        "scaling",
        "--scalings",
        "none,uniform",
        "--steps",
        "16",
        "--seeds",
        "1",
    ]
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--out", str(tmp_path), "--budget", "8steps", "--json", *settings])
        assert stopped.value.code in (0, None)
        found = json.loads(capsys.readouterr().out)
        assert {s["name"] for s in found["standings"]} == {"none", "uniform"}
        assert found["steps"] == 8
        assert found["command"].startswith("scalelong train digits-uvit --scaling ")
        assert "--set model.embed_dim=16" in found["command"]
        assert set(found["against"]) == {"none", "uniform"} - {found["best"]}
    page = (tmp_path / "report.html").read_text()
    assert "has the lowest loss of 2" in page
    assert "data:image/png" in page
    assert len((tmp_path / "rungs.jsonl").read_text().splitlines()) == 4  # the second search trained nothing


def test_a_search_takes_known_rungs_from_its_file(tmp_path, monkeypatch):
    config = tiny_config("digits-uvit", train__steps=8)
    candidates = candidates_of(config, ["scaling"], "none,uniform")
    tune_preset(candidates, [0], tmp_path, budget=Budget(2), quiet=True)
    monkeypatch.setattr("scalelong.experiments.tuning.run_jobs", None)  # any training would fail
    assert tune_preset(candidates, [0], tmp_path, budget=Budget(2), quiet=True).result.steps == 2


def test_a_kill_in_the_middle_of_a_rung_trains_nothing_twice(tmp_path, monkeypatch):
    candidates, trained = candidates_of(tiny_config("digits-uvit", train__steps=8), ["scaling"], "none,uniform"), []

    def run_jobs(jobs, slots, logs, display):
        for job in jobs:
            if not is_finished(job):
                if len(trained) == limit:
                    raise KeyboardInterrupt
                train(job.config, job.folder, quiet=True)
                trained.append((job.name, job.config.train.steps))
        return [Ending(job, 0) for job in jobs], None

    monkeypatch.setattr("scalelong.experiments.tuning.run_jobs", run_jobs)
    limit = 1
    with pytest.raises(KeyboardInterrupt):
        tune_preset(candidates, [0], tmp_path, budget=Budget(4), quiet=True)
    limit = 100
    assert tune_preset(candidates, [0], tmp_path, budget=Budget(4), quiet=True).result.steps == 4
    assert sorted(trained) == [("none-seed0", 1), ("none-seed0", 2), ("uniform-seed0", 1), ("uniform-seed0", 2)]


def test_the_documented_examples_run():
    page = (Path(__file__).resolve().parents[2] / "docs" / "tune.md").read_text(encoding="utf-8")
    names = {}
    for part in page.split("```python\n")[1:]:
        exec(part.split("```")[0], names)
    assert names["result"].best == "lr 0.3"
