"""`scalelong paper` as typed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.errors import ScaleLongError
from scalelong.paper.registry import ITEMS


def typed(*words):
    ended = CliRunner().invoke(app, ["paper", *map(str, words)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended


def test_list_shows_every_item_with_its_cost_and_state(tmp_path):
    ended = typed("list", "--out", tmp_path)
    assert ended.exit_code == 0
    for name in ITEMS:
        assert name in ended.stdout
    assert "not run" in ended.stdout
    rows = json.loads(typed("list", "--out", tmp_path, "--json").stdout)
    assert [row["item"] for row in rows] == list(ITEMS)
    assert all(row["minutes"] >= 1 for row in rows)


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_a_dry_run_prints_commands_and_cost_and_trains_nothing(size, tmp_path):
    ended = typed("table-4", "--size", size, "--dry-run", "--seeds", "2", "--runs", tmp_path / "runs")
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("scalelong train ") for line in lines) == 4
    assert any("GPU-hours" in line if size == "paper" else "min on 2 cores" in line for line in lines)
    assert all(line.startswith(("#", "scalelong ")) for line in lines)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_as_json_is_for_programs(tmp_path):
    facts = json.loads(typed("figure-11", "--size", "paper", "--dry-run", "--json", "--seeds", "1").stdout)
    assert facts["item"] == "figure-11"
    assert [line.split()[1] for line in facts["commands"]] == ["train", "evaluate"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("figur-7",), "did you mean 'figure-7'"),
        (("lst",), "did you mean 'list'"),
        (("figure-1", "--size", "gpu"), "known: cpu, paper"),
        (("figure-1", "--steps", "0"), "--steps is at least 1"),
        (("figure-1", "--seeds", "zero"), "--seeds"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(words, message):
    with pytest.raises(ScaleLongError, match=message):
        typed(*words)


def test_judging_without_runs_is_an_error(tmp_path):
    with pytest.raises(ScaleLongError, match="none of its 6 runs is finished"):
        typed("table-4", "--no-train", "--runs", tmp_path, "--out", tmp_path)


def test_all_goes_on_past_what_cannot_be_run_and_tells_by_its_exit_code(tmp_path):
    ended = typed("all", "--no-train", "--runs", tmp_path, "--out", tmp_path)
    assert ended.exit_code == 1
    assert ended.stderr.count("is finished in") == len(ITEMS)


def test_the_page_is_written_where_the_documentation_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "docs/paper.md" in typed("page").stdout.replace("\\", "/")
    assert "**not run**" in (tmp_path / "docs" / "paper.md").read_text(encoding="utf-8")
