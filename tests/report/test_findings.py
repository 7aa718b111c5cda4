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
    assert result.caveat.startswith("3 seeds")


def test_an_interval_that_includes_no_change_is_not_a_gain():
    runs = [run("none", s, 0.5) for s in range(3)]
    runs += [run("cs-0.7", s, 0.5 * f) for s, f in enumerate((0.9, 1.05, 0.95))]
    result = described(runs, ("none", "cs-0.7"))
    assert result.headline == "No clear difference in validation loss from no scaling"
    assert "[" in result.details[0]  # with the interval beside it


def test_a_clear_loss_is_the_headline_too():
    runs = [run("none", s, 0.5) for s in range(3)]
    runs += [run("cs-0.7", s, 0.5 * f) for s, f in enumerate((1.09, 1.1, 1.11))]
    assert described(runs, ("none", "cs-0.7")).headline == "CS (κ = 0.7) ends above no scaling in validation loss"


def test_one_seed_comes_with_a_caveat():
    one = described([run("none", 0, 0.5), run("cs-0.7", 0, 0.46), run("ls", 0, 0.49)])
    assert one.headline == "CS (κ = 0.7) ends 8 % below no scaling in validation loss"
    assert "may be chance" in one.caveat
    even = described([run("none", 0, 0.5), run("cs-0.7", 0, 0.495), run("ls", 0, 0.501)])
    assert even.headline == "Validation losses end within 1.2 % of each other"


def test_oscillation_is_called_lower_only_where_it_is():
    calm = described([run("none", 0, 0.5, 0.1), run("cs-0.7", 0, 0.5, 0.02), run("ls", 0, 0.5, 0.05)])
    assert "Features oscillate least with CS (κ = 0.7): ×0.2 against no scaling." in calm.details
    wild = described([run("none", 0, 0.5, 0.1), run("cs-0.7", 0, 0.5, 0.2), run("ls", 0, 0.5, 0.3)])
    assert "Features oscillate less with no scaling than with any of the others." in wild.details
    unsure = [run("none", s, 0.5, 0.1) for s in range(3)]
    unsure += [run("cs-0.7", s, 0.5, 0.1 * f) for s, f in enumerate((0.5, 1.2, 0.9))]
    assert any("the interval includes no change" in line for line in described(unsure, ("none", "cs-0.7")).details)


def test_a_variant_that_does_not_reach_the_loss_is_named():
    result = described([run("none", 0, 0.5), run("cs-0.7", 0, 0.4), run("ls", 0, 0.6)])
    line = next(line for line in result.details if "final validation loss" in line)
    assert "LS does not reach it in every seed" in line
    assert "times as soon" in line


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
