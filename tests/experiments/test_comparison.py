"""Figures of runs, and the comparison made from them."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from scalelong.experiments.comparison import summarise
from scalelong.experiments.measures import RunMeasures, late_oscillation, measure_run
from scalelong.experiments.statistics import Estimate
from scalelong.experiments.table import change, plus_minus, print_comparison
from scalelong.runs.logs import Series


def series(values, every=1):
    return Series(np.arange(1.0, len(values) + 1) * every, np.asarray(values, float))


def run(variant, seed, loss=0.5, curve=(1.0, 0.7, 0.5), **values):
    return RunMeasures(
        variant, seed, f"{variant}-seed{seed}", {"val_loss": loss, **values}, {"val_loss": series(curve)}
    )


def test_oscillation_is_the_spread_of_log_differences_in_the_second_half():
    norms = [100.0, 0.01, 100.0, 0.01, 1.0, 2.0, 1.0, 4.0]  # wild at first, which does not count
    late = np.diff(np.log(norms[4:]))
    assert late_oscillation(series(norms)) == pytest.approx(late.std())
    assert late_oscillation(series(np.exp(np.arange(20.0)))) == pytest.approx(0)  # steady growth is no oscillation
    assert late_oscillation(series([1.0, 2.0])) is None


def test_a_norm_of_zero_leaves_out_its_two_differences():
    norms = [1.0, 1.0, 1.0, 1.0, 2.0, 0.0, 3.0, math.nan, 4.0, 8.0, 4.0]
    logs = [math.log(2), -math.log(2)]  # 4 → 8 → 4; from step 6 on nothing else has two finite ends
    assert late_oscillation(series(norms)) == pytest.approx(np.std(logs))


def test_a_run_is_measured_from_its_files(tmp_path):
    rows = [{"step": s, "loss": 1.0, "grad_norm": 1.0, "seconds": s / 10} for s in range(1, 9)]
    rows[3]["val_loss"], rows[7]["val_loss"] = 0.9, 0.4
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    header = {"step": 0, "format": 1, "skips": [{}, {}], "blocks": ["a", "b"]}
    jumps = {6: [0.1, 0.4], 7: [-0.1, -0.4], 8: [0.1, 0.4]}
    looks = [
        {"step": step, "jump": {"probe": {"backbone": jump}, "grad": {"total": jump[0]}}}
        for step, jump in jumps.items()
    ]
    looks.insert(0, {"step": 2, "jump": {"probe": {"backbone": [9.0, 9.0]}, "grad": {"total": 9.0}}})
    (tmp_path / "stability.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [header, *looks]))
    (tmp_path / "resources.json").write_text('{"cpu_seconds": 12.5, "peak_memory": 1048576, "peak_gpu_memory": 0}')
    found = measure_run(tmp_path, "cs", 3)
    spread = np.std([0.1, -0.1, 0.1])
    assert found.values == pytest.approx(
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
    assert list(found.curves["val_loss"].steps) == [4, 8]


def test_an_empty_folder_has_no_figures(tmp_path):
    assert measure_run(tmp_path, "none", 0).values == {}


def test_a_comparison_pairs_by_seed_and_keeps_what_is_missing():
    runs = [run("none", s, 0.5 + s) for s in range(3)] + [run("cs", s, 0.9 * (0.5 + s)) for s in range(2)]
    found = summarise(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1, 2], missing=["cs-seed2 failed"])
    assert not found.complete
    assert found.row("none").means["val_loss"].n == 3
    assert found.row("none").ratios == {}
    ratio = found.row("cs").ratios["val_loss"]
    assert (ratio.n, ratio.mean) == (2, pytest.approx(0.9))
    assert json.loads(json.dumps(found.to_dict()))["missing"] == ["cs-seed2 failed"]


def test_who_never_arrives_is_noted_with_a_bound():
    slow = run("cs", 0, curve=(1.0, 0.9, 0.8))
    found = summarise([run("none", 0), slow], ["none", "cs"], preset="digits", steps=3, seeds=[0])
    assert found.row("cs").sooner["val_loss"].factor is None
    assert any("cs did not reach none's final validation loss in 1 of 1 seed(s)" in note for note in found.notes)


def test_variants_are_judged_by_the_ema_unless_it_lags():
    ahead = [run("none", 0, 0.5, val_loss_ema=0.48), run("cs", 0, 0.5, val_loss_ema=0.52)]
    lagging = [run("none", 0, 0.5, val_loss_ema=0.7), run("cs", 0, 0.5, val_loss_ema=0.6)]
    for runs, key in ((ahead, "val_loss_ema"), (lagging, "val_loss"), ([run("none", 0)], "val_loss")):
        assert summarise(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0]).loss == key


def test_distances_of_different_kinds_are_pointed_out():
    one = RunMeasures("none", 0, "a", {"frechet": 1.0}, {}, {"frechet": "FID"})
    two = RunMeasures("cs", 0, "b", {"frechet": 1.0}, {}, {"frechet": "Fréchet distance of pixels (not FID)"})
    found = summarise([one, two], ["none", "cs"], preset="digits", steps=3, seeds=[0])
    assert any("do not compare" in note for note in found.notes)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Estimate(0.979, 0.97, 0.988, 3), "−2.1 % [−3.0, −1.2]"),
        (Estimate(1.05, None, None, 1), "+5.0 %"),
        (Estimate(0.31, 0.24, 0.4, 3), "×0.31 [0.24, 0.4]"),
        (Estimate(2.5, None, None, 1), "×2.5"),
        (Estimate(0.9, 0.035, 22.9, 2), "×0.9 [0.035, 22.9]"),
    ],
)
def test_changes_in_words(ratio, said):
    assert change(ratio) == said


def test_means_in_words():
    assert plus_minus(Estimate(0.43215, 0.431, 0.4333, 3)) == "0.4321 ± 0.0012"
    assert plus_minus(Estimate(1234.5, None, None, 1)) == "1,234"


def test_the_table_holds_the_figures_and_says_what_they_are():
    from rich.console import Console

    runs = [run("none", s, 0.5) for s in range(3)] + [run("cs", s, 0.45 + s / 1000) for s in range(3)]
    found = summarise(runs, ["none", "cs"], preset="digits", steps=3, seeds=[0, 1, 2], missing=["[bold]x[/] failed"])
    console = Console(file=io.StringIO(), width=110)
    print_comparison(found, console)
    text = console.file.getvalue()
    assert "none (baseline)" in text
    assert "0.451 ± 0.0025" in text
    assert "−9.8 % [−10.3, −9.3]" in text
    assert "Student t interval over 3 seeds" in text
    assert "missing: [bold]x[/] failed" in text
