"""`scalelong compare`: small, but real training in worker processes. Slow tests run the command itself in one too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from scalelong.cli.app import app
from scalelong.errors import RunError
from tiny_runs import read_lines

SMALL = [
    "model.embed_dim=32", "model.depth=4", "model.num_heads=2", "train.batch_size=8", "validate.every=2",
    "validate.n=16", "sample.n=4", "sample.steps=3", "monitor.every=1", "train.log_every=1", "checkpoint.every=2",
]  # fmt: skip


def command(out, *words):
    sets = [word for setting in SMALL for word in ("--set", setting)]
    return [sys.executable, "-m", "scalelong", "compare", "digits-uvit", "--out", str(out), *sets, *words]


def compare_here(out, *words):
    """The command in this process, which saves an import of torch; its runs are processes of their own."""
    return CliRunner().invoke(app, command(out, *words)[3:])


def compare(out, *words):
    return subprocess.run(command(out, *words), capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    words = ("--scalings", "none,cs", "--seeds", "1", "--steps", "6", "--samples", "8", "--jobs", "1")
    return out, words, compare_here(out, *words)


def test_compare_trains_measures_and_writes_everything(done):
    out, _, ended = done
    assert ended.exit_code == 0, ended.output
    assert "not FID" in ended.stdout
    assert "One seed: there is no interval" in ended.stdout
    assert f"page: {out / 'report.html'}" in ended.stdout
    result = json.loads((out / "comparison.json").read_text())
    assert result["complete"]
    assert result["baseline"] == "none"
    assert [run["folder"] for run in result["runs"]] == ["none-seed0", "cs-0.7-seed0"]
    for run in result["runs"]:
        assert set(run["values"]) >= {
            "val_loss", "val_loss_ema", "frechet", "feature_oscillation", "gradient_oscillation", "seconds", "memory",
        }  # fmt: skip
    assert result["rows"][1]["means"]["val_loss"]["low"] is None
    assert result["rows"][1]["ratios"]["val_loss"]["mean"] == pytest.approx(
        result["runs"][1]["values"]["val_loss"] / result["runs"][0]["values"]["val_loss"]
    )


def test_times_have_a_ratio_only_if_the_runs_were_alone(done):
    """Whether they were depends on the machine that runs this test, and is recorded."""
    out, _, _ = done
    result = json.loads((out / "comparison.json").read_text())
    alone = all(run["alone"] for run in result["runs"])
    assert ({"seconds", "cpu_seconds"} <= set(result["rows"][1]["ratios"])) == alone
    for run in result["runs"]:
        recorded = json.loads((out / run["folder"] / "resources.json").read_text())
        assert run["alone"] == (recorded["other_cpu_seconds"] <= 0.1 * recorded["wall_seconds"])


def test_samples_of_untrained_networks_are_not_judged(done):
    out, _, _ = done
    result = json.loads((out / "comparison.json").read_text())
    assert not any(run["images"] for run in result["runs"])
    assert "frechet" in result["rows"][1]["means"]
    assert "frechet" not in result["rows"][1]["ratios"]


def test_the_numbers_are_those_of_the_runs(done):
    out, _, _ = done
    result = json.loads((out / "comparison.json").read_text())
    for run in result["runs"]:
        lines = read_lines(out / run["folder"] / "metrics.jsonl")
        assert run["values"]["val_loss"] == [line["val_loss"] for line in lines if "val_loss" in line][-1]
        assert run["values"]["frechet"] == json.loads((out / run["folder"] / "distance.json").read_text())["frechet"]


def test_the_same_command_again_trains_nothing(done):
    out, words, _ = done
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    ended = compare_here(out, *words, "--json", "--no-report")
    assert ended.exit_code == 0, ended.output
    assert "started" not in ended.stderr
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")} == before
    assert json.loads(ended.stdout) == json.loads((out / "comparison.json").read_text())


def test_other_settings_in_the_same_folder_are_rejected(done):
    out, words, _ = done
    ended = compare_here(out, *words, "--set", "train.lr=0.5")
    assert ended.exit_code == 1
    assert isinstance(ended.exception, RunError)
    assert "train.lr" in str(ended.exception)


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_exit_code_is_one(tmp_path):
    (tmp_path / "cs-0.7-seed0").write_text("a file where a folder should be")
    ended = compare(
        tmp_path, "--scalings", "none,cs", "--seeds", "1", "--steps", "2", "--distance", "none", "--jobs", "1"
    )
    assert ended.returncode == 1
    assert "error: cs-0.7-seed0 failed with exit code 1" in ended.stderr
    result = json.loads((tmp_path / "comparison.json").read_text())
    assert not result["complete"]
    assert result["missing"] == ["cs-0.7-seed0 failed with exit code 1"]
    assert [run["variant"] for run in result["runs"]] == ["none"]


@pytest.mark.slow
def test_runs_that_diverge_are_on_the_page_with_their_error(tmp_path):
    settings = [f"--set={setting}" for setting in ("train.lr=1e12", "train.clip=none", "train.warmup=1")]
    words = ("--scalings", "none,cs", "--seeds", "1", "--steps", "9", "--distance", "none", "--jobs", "1", *settings)
    ended = compare(tmp_path, *words)
    assert ended.returncode == 1
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("is not finished: step 1 of 9: the loss is not finite at step 2") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_at_any_moment_the_same_command_ends_with_the_same_losses(tmp_path, number):
    words = ("--scalings", "none,ls", "--seeds", "1", "--steps", "40", "--distance", "none", "--no-report")
    whole = compare(tmp_path / "whole", *words, "--jobs", "1")
    assert whole.returncode == 0, whole.stderr

    out = tmp_path / "stopped"
    process = subprocess.Popen(command(out, *words, "--jobs", "1"), stderr=subprocess.PIPE, text=True)
    log = out / "ls-seed0" / "metrics.jsonl"
    until = time.monotonic() + 300
    while not (log.exists() and log.read_text().count("\n") > 5):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, printed = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert "the same command" in printed
    again = compare(out, *words, "--jobs", "1")
    assert again.returncode == 0, again.stderr
    for name in ("none-seed0", "ls-seed0"):
        one, two = (
            [(line["step"], line["loss"]) for line in read_lines(folder / name / "metrics.jsonl")]
            for folder in (tmp_path / "whole", out)
        )
        assert one == two
