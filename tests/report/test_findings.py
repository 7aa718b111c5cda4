"""Headlines claim no more than the numbers support."""

from __future__ import annotations

import numpy as np
import pytest

from scalelong.experiments.comparison import Comparison, RunMeasures
from scalelong.report.findings import findings, spell
from scalelong.runs.logs import Series


def run(variant, seed, loss, oscillation=None, speed=1.0):
    steps = np.arange(100.0, 1001.0, 100.0)
    curve = Series(steps, loss + np.exp(-speed * steps / 300) - np.exp(-speed * 1000 / 300))
    values = {"val_loss": loss} | ({} if oscillation is None else {"feature_oscillation": oscillation})
    return RunMeasures(variant, seed, variant, values, {"val_loss": curve})


def described(runs, variants=("none", "cs-0.7", "ls")):
    seeds = sorted({r.seed for r in runs})
    comparison = Comparison(runs, variants, preset="digits", steps=1000, seeds=seeds)
    return findings(comparison, variants, 1000, "digits")


def test_a_clear_gain_over_seeds_is_the_headline():
    runs = [run("none", s, 0.50 + s / 100) for s in range(3)]
    runs += [run("cs-0.7", s, (0.50 + s / 100) * f) for s, f in enumerate((0.949, 0.95, 0.951))]
    result = described(runs, ("none", "cs-0.7"))
    assert result.headline == "CS (κ = 0.7) ends 5 % below no scaling in validation loss"
    assert result.caveat == ""


def test_an_interval_that_includes_no_change_is_not_a_gain():
    runs = [run("none", s, 0.5, 0.1) for s in range(3)]
    runs += [run("cs-0.7", s, 0.5 * f, 0.1 * g) for s, (f, g) in enumerate([(0.9, 0.5), (1.05, 1.2), (0.95, 0.9)])]
    result = described(runs, ("none", "cs-0.7"))
    assert result.headline == "No clear difference in validation loss from no scaling"
    assert result.details == ()


def test_a_clear_loss_is_the_headline_too():
    runs = [run("none", s, 0.5) for s in range(3)]
    runs += [run("cs-0.7", s, 0.5 * f) for s, f in enumerate((1.09, 1.1, 1.11))]
    assert described(runs, ("none", "cs-0.7")).headline == "CS (κ = 0.7) ends above no scaling in validation loss"


def test_one_seed_claims_nothing():
    one = described([run("none", 0, 0.5, 0.1), run("cs-0.7", 0, 0.46, 0.01), run("ls", 0, 0.49, 0.2)])
    for measures in (one_run := [run("none", 0, 0.5), run("cs-0.7", 0, 0.46)]):
        measures.values["norm_outer"] = 10.0 if measures.variant == "none" else 1.0
    assert described(one_run, ("none", "cs-0.7")).details == ()
    assert one.headline == "Validation losses end between 0.46 (CS (κ = 0.7)) and 0.5 (no scaling)"
    assert one.details == ()
    assert "may be chance" in one.caveat
    even = described([run("none", 0, 0.5), run("cs-0.7", 0, 0.495), run("ls", 0, 0.501)])
    assert even.headline == "Validation losses end within 1.2 % of each other"


def test_a_bullet_names_the_variants_with_a_clear_difference_only():
    runs = [run("none", s, 0.5, 0.1) for s in range(3)]
    runs += [run("cs-0.7", s, 0.5, 0.1 * f, speed=2) for s, f in enumerate((0.29, 0.3, 0.31))]
    runs += [run("ls", s, 0.5, 0.1 * f) for s, f in enumerate((0.5, 1.2, 0.9))]
    oscillation = next(line for line in described(runs).details if "oscillation" in line)
    assert oscillation.startswith("Relative oscillation of features (ours) against no scaling: CS (κ = 0.7) ×0.3")
    assert "LS" not in oscillation


def test_a_variant_that_is_sooner_in_every_seed_is_named():
    runs = [run("none", s, 0.5) for s in range(3)]
    runs += [run("cs-0.7", s, 0.4 + s / 1000) for s in range(3)] + [run("ls", s, 0.6) for s in range(3)]
    line = next(line for line in described(runs).details if "is reached" in line)
    assert "CS (κ = 0.7)" in line
    assert "LS" not in line


def test_runs_without_numbers_make_no_claim():
    assert findings(None, ["a", "b"], 10, "digits").headline == "2 runs on digits, 10 steps"
    alone = described([run("cs-0.7", 0, 0.5)], ("cs-0.7",))
    assert alone.headline == "CS (κ = 0.7) on digits after 1,000 steps: validation loss 0.5"


@pytest.mark.parametrize(
    ("label", "words"),
    [("none", "no scaling"), ("cs-reverse-0.5", "reversed CS (κ = 0.5)"), ("<b>", "<b>"), ("cs-x", "cs-x")],
)
def test_labels_are_spelled_out(label, words):
    assert spell(label) == words
