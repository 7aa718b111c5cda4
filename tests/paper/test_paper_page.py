"""docs/paper.md shows what the JSON files contain, and no more."""

from __future__ import annotations

import re
from pathlib import Path

from paper_runs import TINY

from scalelong.experiments.campaign import read_plan
from scalelong.experiments.campaign_results import Results
from scalelong.experiments.statistics import Estimate
from scalelong.files import write_text
from scalelong.paper.items import ITEMS
from scalelong.paper.judge import AGREES, DISAGREES, OPEN, VERDICTS, Claim, above, below
from scalelong.paper.page import CAMPAIGNS, INTRODUCTION, measured, page
from scalelong.paper.run import FORMAT, to_json

ROOT = Path(__file__).resolve().parents[2]


def made(**changes):
    claims = [
        Claim("CS lowers a|b", "a, CS / none", below(1.0), Estimate(0.6123, 0.5, 0.7, 3), "FID 2.98 / 3.11"),
        Claim("LS lowers a", "a, LS / none", below(1.0), Estimate(0.9, 0.7, 1.1, 3)),
    ]
    return {
        "format": FORMAT, "item": "table-4", "title": "t", "paper_shows": "p", "size": "cpu", "differs": "2 steps",
        "complete": True, "runs": 4, "missing": [], "failures": [], "studies": [], "processor_minutes": 2.5,
        "claims": [claim.to_dict() for claim in claims],
        "verdicts": {v: sum(claim.verdict == v for claim in claims) for v in VERDICTS},
        "tables": [{"title": "T", "columns": ["x", "y"], "rows": [["1", "2"]]}], "notes": ["A note."],
        "figure": "table-4.png", "data": {}, **changes,
    }  # fmt: skip


def test_an_item_without_a_result_is_marked_as_not_run(tmp_path):
    text = page(tmp_path, tmp_path / "paper.md")
    assert text.count("**not run**") == len(ITEMS)
    for name in ITEMS:
        assert f"`scalelong paper {name}` runs it" in text


def test_the_page_shows_claims_intervals_and_verdicts(tmp_path):
    write_text(tmp_path / "table-4.json", to_json(made()))
    text = page(tmp_path, tmp_path / "paper.md")
    assert f"| CS lowers a\\|b | FID 2.98 / 3.11 | below 1 | 0.6123 [0.5, 0.7] | **{AGREES}** |" in text
    assert f"| LS lowers a |  | below 1 | 0.9 [0.7, 1.1] | **{OPEN}** |" in text
    assert "| [table-4](#table-4) | The direction of scaling | 1 | 1 |  |  |" in text
    assert "Here: 2 steps." in text
    assert text.count("**not run**") == len(ITEMS) - 1
    assert "incomplete" not in text.lower()


def test_an_incomplete_item_names_what_is_missing(tmp_path):
    write_text(tmp_path / "table-4.json", to_json(made(complete=False, missing=["campaign/cs-0.7-seed2"])))
    text = page(tmp_path, tmp_path / "paper.md")
    assert "4 of 5 runs are finished; missing: campaign/cs-0.7-seed2" in text
    assert "The direction of scaling (**incomplete**)" in text


def test_the_regime_and_the_rule_precede_the_results(tmp_path):
    text = page(tmp_path, tmp_path / "paper.md")
    assert text.startswith(INTRODUCTION.read_text(encoding="utf-8").strip())
    assert text.index("## The regime") < text.index("## The rule") < text.index("## Results")
    assert "the whole interval lies inside the region" in text
    assert text.count("```") % 2 == 0


def test_a_measurement_without_interval_is_shown_without_one():
    assert measured(Claim("c", "q", below(1.0), None).to_dict()) == "–"
    assert measured(Claim("c", "q", below(1.0), Estimate(0.25, None, None, 1)).to_dict()) == "0.25"


def test_an_acceleration_that_seeds_do_not_have_is_shown_as_a_bound():
    claim = Claim("c", "q", above(1.0), Estimate(1.0, 1.0, 1.0, 3), "at least 1.5×", "reached in 0 of 3, below 1.00")
    assert claim.verdict == DISAGREES
    assert measured(claim.to_dict()) == "reached in 0 of 3, below 1.00"


def test_items_show_what_campaigns_say_about_them():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    for name, (campaigns, keys) in CAMPAIGNS.items():
        assert sections[name].count("**Campaign:**") == len(campaigns)
        for campaign in campaigns:
            verdicts = Results(read_plan(ROOT / "results" / "campaign" / campaign)).verdicts()
            shown = [v for v in verdicts if v.key in keys]
            assert shown
            assert all(f"| {v.claim} | " in sections[name] and f" {v.text} " in sections[name] for v in shown)
    assert "**Campaign:**" not in sections["figure-6"]


def test_the_documentation_is_generated_from_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == page()


def test_every_image_on_the_page_exists():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target


def test_the_tiny_study_is_not_part_of_the_items():
    assert all(TINY not in item.cpu for item in ITEMS.values())
