"""Measures of runs, and the comparison computed from them."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from scalelong.experiments.compare import print_comparison
from scalelong.experiments.comparison import Comparison, RunMeasures, late_oscillation, measure_run
from scalelong.runs.logs import Series
from scalelong.runs.resources import ran_alone
from scalelong.runs.run import Run


def series(values, every=1):
    return Series(np.arange(1.0, len(values) + 1) * every, np.asarray(values, float))


def run(variant, seed, loss=0.5, curve=(1.0, 0.7, 0.5), **values):
    return RunMeasures(
        variant, seed, f"{variant}-seed{seed}", {"val_loss": loss, **values}, {"val_loss": series(curve)}
    )


def test_oscillation_is_the_spread_of_log_differences_in_the_second_half():
    norms = [100.0, 0.01, 100.0, 0.01, 1.0, 2.0, 1.0, 4.0]  # the first half does not count
    late = np.diff(np.log(norms[4:]))
    assert late_oscillation(series(norms)) == pytest.approx(late.std())
    assert late_oscillation(series(np.exp(np.arange(20.0)))) == pytest.approx(0)  # steady growth does not oscillate
    assert late_oscillation(series([1.0, 2.0])) is None
    assert late_oscillation(series(norms, every=10)) is None  # successive entries are not one step apart


def test_a_norm_of_zero_removes_its_two_differences():
    norms = [1.0, 1.0, 1.0, 1.0, 2.0, 0.0, 3.0, math.nan, 4.0, 8.0, 4.0]
    logs = [math.log(2), -math.log(2)]  # 4 → 8 → 4; from step 6 on nothing else has two finite ends
    assert late_oscillation(series(norms)) == pytest.approx(np.std(logs))


def test_a_run_is_measured_from_its_files(tmp_path):
    rows = [{"step": s, "loss": 1.0, "grad_norm": 1.0, "seconds": s / 10} for s in range(1, 9)]
    rows[3]["val_loss"], rows[7]["val_loss"] = 0.9, 0.4
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    header = {"step": 0, "format": 1, "skips": [{}, {}], "blocks": ["a", "b"]}
    jumps = {6: [0.1, 0.4], 7: [-0.1, -0.4], 8: [0.1, 0.4]}
    snapshots = [
        {"step": step, "jump": {"probe": {"backbone": jump}, "grad": {"total": jump[0]}}}
        for step, jump in jumps.items()
    ]
    snapshots.insert(0, {"step": 2, "jump": {"probe": {"backbone": [9.0, 9.0]}, "grad": {"total": 9.0}}})
    (tmp_path / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [header, *snapshots]))
    (tmp_path / "resources.json").write_text('{"format": 2, "cpu_seconds": 12.5, "peak_memory": 1048576}')
    measures = measure_run(Run(tmp_path), "cs", 3)
    spread = np.std([0.1, -0.1, 0.1])
    assert measures.values == pytest.approx(
        {
            "val_loss": 0.4,
            "seconds": 0.8,
            "cpu_seconds": 12.5,
            "memory": 1.0,
            "gradient_oscillation": spread,
            "feature_oscillation": 2.5 * spread,
            "middle_oscillation": 4 * spread,
        }
    )
    assert list(measures.curves["val_loss"].steps) == [4, 8]


def test_a_loss_that_is_not_finite_at_the_end_has_no_final_value(tmp_path):
    losses = [0.9, 0.5, math.nan]
    rows = [{"step": step, "val_loss": loss} for step, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "val_loss" not in measure_run(Run(tmp_path), "cs", 0).values


def test_a_distance_of_an_earlier_step_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 200, "val_loss": 0.5}\n')
    for step in (100, 200):
        card = {"metric": "Fréchet distance", "generation": {"step": step}}
        (tmp_path / "distance.json").write_text(json.dumps({"frechet": 9.0, "card": card}))
        assert ("frechet" in measure_run(Run(tmp_path), "cs", 0).values) == (step == 200)


def test_an_empty_folder_has_no_measures(tmp_path):
    assert measure_run(Run(tmp_path), "none", 0).values == {}


def test_a_comparison_pairs_by_seed_and_lists_missing_runs():
    runs = [run("none", s, 0.5 + s) for s in range(3)] + [run("cs", s, 0.9 * (0.5 + s)) for s in range(2)]
    comparison = Comparison(
        runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1, 2], missing=["cs-seed2 failed"]
    )
    assert not comparison.complete
    assert comparison.row("none").means["val_loss"].n == 3
    assert comparison.row("none").ratios == {}
    ratio = comparison.row("cs").ratios["val_loss"]
    assert (ratio.n, ratio.mean) == (2, pytest.approx(0.9))
    assert json.loads(json.dumps(comparison.to_dict()))["missing"] == ["cs-seed2 failed"]


def test_a_seed_that_became_nonfinite_leaves_no_factor_and_shows_how_many_pairs_are_left():
    runs = [run("none", s, 0.5, (1.0, 0.8, 0.5)) for s in range(3)]
    runs += [run("cs", s, 0.4, (1.0, 0.5, 0.4)) for s in range(2)]
    comparison = Comparison(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1, 2], failed=[("cs", 2)])
    assert comparison.row("cs").sooner["val_loss"].factor is None
    table = {title: cells[1] for title, _, cells in comparison.table()}
    assert table["sooner"] == ("–", "reached in 2 of 3 (1.50×, 1.50×), 1 became non-finite")
    assert table["validation loss"][1] == "−20.0 % [−20.0, −20.0] (n = 2)"


def test_every_join_and_block_is_compared_with_the_baseline():
    def norms(factor, growth):
        part = {"norm": [10.0 * factor, 20.0], "growth": [growth, 0.5], "absolute_oscillation": [factor, None],
                "relative_oscillation": [0.1, 0.1], "steps": [1], "smooth": [], "raw": []}  # fmt: skip
        return {"blocks_names": ["a", "b"], "backbone": part, "blocks": part}

    runs = [RunMeasures("none", s, "", {}, {}, norms=norms(1.0, 0.5)) for s in range(2)]
    runs += [RunMeasures("cs", s, "", {}, {}, norms=norms(0.5, 0.25)) for s in range(2)]
    comparison = Comparison(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1])
    for part in ("backbone", "blocks"):
        assert [e.mean for e in comparison.pointwise(part, "norm")["cs"]] == pytest.approx([0.5, 1.0])
        assert [e.mean for e in comparison.pointwise(part, "growth")["cs"]] == pytest.approx([-0.25, 0.0])
        half, unknown = comparison.pointwise(part, "absolute_oscillation")["cs"]
        assert (half.mean, half.n, unknown) == (0.5, 2, None)
    stored = json.loads(json.dumps(comparison.to_dict()))
    assert stored["blocks"] == ["a", "b"]
    assert stored["pointwise"]["blocks"]["growth"]["cs"][0]["mean"] == -0.25
    assert stored["runs"][0]["norms"]["backbone"]["norm"] == [10.0, 20.0]


def test_growth_is_compared_by_a_difference():
    runs = [run(name, s, growth_outer=0.5 + 0.1 * s - (name == "cs")) for name in ("none", "cs") for s in range(2)]
    comparison = Comparison(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1])
    assert comparison.row("cs").differences["growth_outer"].mean == pytest.approx(-1)
    assert "growth_outer" not in comparison.row("cs").ratios
    cells = {title: cells[1] for title, _, cells in comparison.table()}["growth of the norm, outer joins"]
    assert cells[1] == "−1.00 [−1.00, −1.00]"


def test_a_variant_that_never_reaches_the_value_is_noted_with_a_bound():
    slow = run("cs", 0, curve=(1.0, 0.9, 0.8))
    comparison = Comparison([run("none", 0), slow], ["none", "cs"], preset="digits", steps=3, seeds=[0])
    assert comparison.row("cs").sooner["val_loss"].factor is None
    assert comparison.table()[-1][2][1] == ("not reached", "reached in 0 of 1, below 1.00")


def costly(variant, seconds, other):
    resources = {"format": 2, "cpu_seconds": seconds, "wall_seconds": seconds, "other_cpu_seconds": other}
    values = {"seconds": seconds, "cpu_seconds": seconds, "memory": 100.0}
    return RunMeasures(variant, 0, variant, values, {}, alone=ran_alone(resources))


def test_times_are_compared_only_between_runs_that_had_the_machine_to_themselves():
    alone = Comparison([costly("none", 10, 0.1), costly("cs", 12, 0.1)], ["none", "cs"], "digits", 3, [0])
    assert set(alone.row("cs").ratios) == {"seconds", "cpu_seconds", "memory"}
    shared = Comparison([costly("none", 10, 0.1), costly("cs", 12, 8)], ["none", "cs"], "digits", 3, [0])
    assert set(shared.row("cs").ratios) == {"memory"}
    assert [measure.key for measure in shared.measures()] == ["cpu_seconds", "memory"]
    assert "shared the machine" in shared.measures()[0].note


def test_figures_of_older_runs_that_include_the_preparation_of_data_are_left_out(tmp_path):
    (tmp_path / "resources.json").write_text('{"cpu_seconds": 12.5, "peak_memory": 1048576}')
    measured = measure_run(Run(tmp_path), "none", 0)
    assert measured.values == {}
    assert not measured.alone


def evaluation(value, **others):
    metrics = {"frechet": {"value": value, "details": {"constant": 20.0}, "label": "Fréchet distance"}, **others}
    return json.dumps({"format": 1, "frechet": value, "metrics": metrics, "card": {"metric": "Fréchet distance"}})


def test_distances_of_samples_that_are_not_images_are_not_compared(tmp_path):
    for name, value in (("none", 65.0), ("cs", 12.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "distance.json").write_text(evaluation(value))
    runs = [measure_run(Run(tmp_path / name), name, 0) for name in ("none", "cs")]
    comparison = Comparison(runs, ["none", "cs"], "digits", 3, [0])
    assert comparison.row("none").means["frechet"].mean == 65
    assert comparison.row("cs").ratios == {}
    assert [note for note in comparison.notes if "samples of none are farther" in note]


def test_a_metric_of_the_user_has_a_row(tmp_path):
    gap = {"value": 0.25, "interval": None, "details": {}, "label": "mean gap (8×8 pixels)"}
    (tmp_path / "distance.json").write_text(evaluation(5.0, **{"mean-gap": gap}))
    comparison = Comparison([measure_run(Run(tmp_path), "none", 0)], ["none"], "digits", 3, [0])
    assert [measure.title for measure in comparison.measures()] == ["Fréchet distance", "mean gap (8×8 pixels)"]


def test_the_ema_ranks_variants_unless_it_lags():
    ahead = [run("none", 0, 0.5, val_loss_ema=0.48), run("cs", 0, 0.5, val_loss_ema=0.52)]
    lagging = [run("none", 0, 0.5, val_loss_ema=0.7), run("cs", 0, 0.5, val_loss_ema=0.6)]
    for runs, key in ((ahead, "val_loss_ema"), (lagging, "val_loss"), ([run("none", 0)], "val_loss")):
        assert Comparison(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0]).loss == key


def test_an_absolute_oscillation_that_was_not_measured_is_noted():
    short = [RunMeasures(name, 0, "", {"norm_outer": 1.0}, {}) for name in ("none", "cs")]
    long = [RunMeasures(name, 0, "", {"norm_outer": 1.0, "absolute_outer": 0.1}, {}) for name in ("none", "cs")]
    for runs, said in ((short, True), (long, False)):
        notes = Comparison(runs, ["none", "cs"], preset="digits", steps=60, seeds=[0]).notes
        assert any("needs 10 snapshots" in note and "monitor.every" in note for note in notes) is said


def test_distances_of_different_kinds_are_noted():
    one = RunMeasures("none", 0, "a", {"frechet": 1.0}, {}, {"frechet": "FID"})
    two = RunMeasures("cs", 0, "b", {"frechet": 1.0}, {}, {"frechet": "Fréchet distance of pixels (not FID)"})
    comparison = Comparison([one, two], ["none", "cs"], preset="digits", steps=3, seeds=[0])
    assert any("do not compare" in note for note in comparison.notes)


def test_the_table_shows_the_numbers_and_how_they_are_computed():
    from rich.console import Console

    runs = [run("none", s, 0.5) for s in range(3)] + [run("cs", s, 0.45 + s / 1000) for s in range(3)]
    comparison = Comparison(
        runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1, 2], missing=["[bold]x[/] failed"]
    )
    console = Console(file=io.StringIO(), width=110)
    print_comparison(comparison, console)
    text = console.file.getvalue()
    assert "none (baseline)" in text
    assert "0.451 ± 0.0025" in text
    assert "−9.8 % [−10.3, −9.3]" in text
    assert "Student t interval over 3 seeds" in text
    assert "missing: [bold]x[/] failed" in text
