"""`scalelong paper` as typed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.errors import InvalidValueError, RunError, ScaleLongError, UnknownNameError
from scalelong.paper.items import ITEMS


def typed(*words):  # exceptions pass through, as `main` would see them
    result = CliRunner().invoke(app, ["paper", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list_shows_every_item_with_its_cost_and_state(tmp_path):
    result = typed("list", "--out", tmp_path)
    assert result.exit_code == 0
    for name in ITEMS:
        assert name in result.stdout
    assert "not run" in result.stdout
    rows = json.loads(typed("list", "--out", tmp_path, "--json").stdout)
    assert [row["item"] for row in rows] == list(ITEMS)
    assert all(row["minutes"] >= 1 for row in rows)


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_a_dry_run_prints_commands_and_cost_and_trains_nothing(size, tmp_path):
    result = typed("table-4", "--size", size, "--dry-run", "--seeds", "2", "--runs", tmp_path / "runs")
    lines = result.stdout.splitlines()
    assert sum(line.startswith("scalelong train ") for line in lines) == 4
    assert any("GPU-hours" in line if size == "paper" else "min on 2 cores" in line for line in lines)
    assert all(line.startswith(("#", "scalelong ")) for line in lines)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("steps", [(), ("--steps", "100000")])
def test_one_study_of_an_item_costs_its_share_and_trains_its_runs_only(steps):
    words = ("figure-5", "--size", "paper", "--dry-run", "--memory", "40", "--json", *steps)
    whole = json.loads(typed(*words).stdout)
    part = json.loads(typed(*words, "--study", "celeba64-curves").stdout)
    ((name, cost),) = part["studies"].items()
    assert whole["studies"][name] == cost
    assert part["commands"] == [line for line in whole["commands"] if f"/{name}/" in line]
    assert sum(line.startswith("scalelong train celeba64-uvit-s ") for line in part["commands"]) == 12


def test_a_dry_run_for_several_gpus_prints_how_to_launch_them():
    words = ("table-4", "--size", "paper", "--dry-run", "--seeds", "1", "--gpus", "8", "--memory", "40")
    lines = [line for line in typed(*words).stdout.splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.startswith("accelerate launch --multi_gpu --num_processes 8 -m scalelong ") for line in lines)


def test_a_dry_run_prints_json(tmp_path):
    facts = json.loads(typed("figure-11", "--size", "paper", "--dry-run", "--json", "--seeds", "1").stdout)
    assert facts["item"] == "figure-11"
    assert [line.split()[1] for line in facts["commands"]] == ["train", "evaluate"] * 2
    assert facts["studies"]["cifar10"]["training"] > facts["studies"]["cifar10"]["evaluation"] > 0


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("figur-7",), UnknownNameError, "figure-7"),
        (("figure-5", "--study", "campain"), UnknownNameError, "campaign"),
        (("lst",), UnknownNameError, "list"),
        (("figure-1", "--size", "gpu"), UnknownNameError, "gpu.*cpu, paper"),
        (("figure-1", "--steps", "0"), InvalidValueError, "--steps.*0"),
        (("figure-1", "--seeds", "zero"), ScaleLongError, "--seeds.*zero"),
    ],
)
def test_invalid_arguments_raise_and_name_the_value(words, error, message):
    with pytest.raises(error, match=message):
        typed(*words)


def test_judging_without_runs_raises_and_counts_them(tmp_path):
    with pytest.raises(RunError, match="6 runs"):
        typed("table-4", "--no-train", "--runs", tmp_path, "--out", tmp_path)


def test_all_continues_after_a_failing_item_and_exits_with_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from the records of figures 1 and 12
    result = typed("all", "--no-train", "--runs", tmp_path, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.count("is finished in") == len(ITEMS)


def test_the_page_is_written_where_the_documentation_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "docs/paper.md" in typed("page").stdout.replace("\\", "/")
    assert "**not run**" in (tmp_path / "docs" / "paper.md").read_text(encoding="utf-8")
