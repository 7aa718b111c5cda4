"""docs/campaign.md: its tables are those of the committed records, and its text says what its tables say."""

import re
from pathlib import Path

from scalelong.cli.campaign import END, START
from scalelong.experiments.campaign import read_plan
from scalelong.experiments.campaign_results import Results, page

ROOT = Path(__file__).resolve().parents[1]
TEXT, _, REST = (ROOT / "docs" / "campaign.md").read_text(encoding="utf-8").partition(START)
TABLES = REST.partition(END)[0]
ESTIMATE = re.compile(r"([-−]?[\d.]+) \[([-−]?[\d.]+), ([-−]?[\d.]+)\]")


def test_the_tables_are_those_of_the_records(monkeypatch):
    monkeypatch.chdir(ROOT)
    folders = sorted(plan.parent for plan in Path("results/campaign").glob("*/plan.toml"))
    assert page([Results(read_plan(folder)) for folder in folders]).strip() == TABLES.strip(), (
        "run scalelong campaign results/campaign/* --no-run --page docs/campaign.md"
    )


def test_every_interval_of_the_text_stands_in_a_table():
    measured = {tuple(map(_number, estimate)) for estimate in ESTIMATE.findall(TABLES)}
    said = ESTIMATE.findall(TEXT)
    assert len(said) >= 8
    assert [one for one in said if not any(_rounds_to(one, three) for three in measured)] == []


def test_the_text_counts_the_finished_runs_as_the_tables_do():
    counts = re.findall(r"(\d+) of (\d+) (?:planned )?runs are finished", TEXT)
    assert set(counts) <= set(re.findall(r"(\d+) of (\d+) planned runs are finished", TABLES))


def _number(text):
    return float(text.replace("−", "-"))


def _rounds_to(said, measured):
    return all(
        abs(_number(text) - value) <= 0.51 * 10.0 ** -len(text.partition(".")[2])
        for text, value in zip(said, measured, strict=True)
    )
