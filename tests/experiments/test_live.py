"""What a person sees of runs that train side by side."""

from __future__ import annotations

import io
import json

import pytest

from scalelong.experiments import live
from scalelong.experiments.live import Live, clock
from scalelong.experiments.plan import plan, scaling_variants
from scalelong.experiments.scheduler import Ending
from scalelong.experiments.slots import Slot


@pytest.fixture
def jobs(tmp_path):
    return plan(scaling_variants("digits", "none,cs,ls", steps=100), (0,), tmp_path)


def log(job, *entries):
    job.folder.mkdir(exist_ok=True)
    with open(job.folder / "metrics.jsonl", "a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def table(shown):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120)
    console.print(shown._table())
    return console.file.getvalue()


def test_the_table_has_every_run_with_its_step_and_figures(jobs):
    shown = Live(jobs, quiet=True)
    shown.started(jobs[0], Slot("1 thread(s)"))
    log(jobs[0], {"step": 10, "loss": 0.75, "grad_norm": 1.5}, {"step": 20, "loss": 0.5, "val_loss": 0.625})
    shown.look()
    text = table(shown)
    assert "0 of 3 runs done" in text
    line = next(line for line in text.splitlines() if "none-seed0" in line)
    assert "20/100" in line
    assert all(figure in line for figure in ("0.5", "0.625", "1.5"))
    assert "cs-0.7-seed0" in text


def test_speed_counts_what_this_process_did(jobs, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    log(jobs[0], {"step": 60, "loss": 1.0})  # of a former process
    shown = Live(jobs, quiet=True)
    shown.started(jobs[0], Slot("x"))
    shown.look()
    state = shown.states["none-seed0"]
    assert state.speed(now[0]) is None
    now[0] = 110.0
    log(jobs[0], {"step": 70, "loss": 1.0})
    shown.look()
    now[0] = 120.0
    log(jobs[0], {"step": 80, "loss": 1.0})
    shown.look()
    assert state.speed(now[0]) == pytest.approx(1.0)
    assert state.left(now[0]) == "20 s"
    log(jobs[0], {"step": 100, "loss": 1.0})
    shown.look()
    assert state.left(now[0]) == "measuring"


def test_without_a_terminal_it_is_plain_lines(jobs, capsys, monkeypatch):
    monkeypatch.setattr(live, "LINES_EVERY", 0.0)
    with Live(jobs) as shown:
        shown.started(jobs[0], Slot("gpu 0"))
        log(jobs[0], {"step": 10, "loss": 0.75, "grad_norm": 1.5})
        shown.look()
        shown.ended(Ending(jobs[0], 1, ("error: the disk is full",), 61.0))
        shown.ended(Ending(jobs[1], 0))
    said = capsys.readouterr()
    assert said.out == ""  # so that --json stays clean
    assert said.err.splitlines() == [
        "none-seed0: started (gpu 0)",
        "none-seed0: step 10 of 100, loss 0.75, gradient 1.5",
        "none-seed0: failed with exit code 1 after 1:01, loss 0.75, gradient 1.5",
        "    error: the disk is full",
        "cs-0.7-seed0: done",
    ]


def test_quiet_is_quiet(jobs, capsys):
    with Live(jobs, quiet=True) as shown:
        shown.started(jobs[0], Slot("gpu 0"))
        shown.ended(Ending(jobs[0], 1, ("x",)))
    assert capsys.readouterr().err == ""


def test_what_matters_is_shown_of_many_runs(tmp_path):
    many = plan(scaling_variants("digits", "none"), range(50), tmp_path)
    shown = Live(many, quiet=True)
    shown.ended(Ending(many[49], 1))
    for job in many[:20]:
        shown.ended(Ending(job, 0))
    names = [state.job.name for state in shown._shown()]
    assert len(names) == live.ROWS
    assert names[-1] == "none-seed49"
    assert "none-seed20" in names


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (59, "59 s"), (61, "1:01"), (3725, "1:02:05")])
def test_clock(seconds, said):
    assert clock(seconds) == said
