"""Progress of runs that train side by side."""

from __future__ import annotations

import json

import pytest

from scalelong.experiments import live
from scalelong.experiments.live import Live
from scalelong.experiments.plan import plan, scaling_variants
from scalelong.experiments.scheduler import Ending, Slot


@pytest.fixture
def jobs(tmp_path):
    return plan(scaling_variants("digits", "none,cs,ls", steps=100), (0,), tmp_path)


def log(job, *entries):
    job.folder.mkdir(exist_ok=True)
    with open(job.folder / "metrics.jsonl", "a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def table(display):
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=140)
    console.print(display.progress.get_renderable())
    return console.file.getvalue()


def test_the_table_shows_every_run_with_its_step_and_metrics(jobs):
    display = Live(jobs, quiet=True)
    display.started(jobs[0], Slot("1 thread(s)"))
    log(jobs[0], {"step": 10, "loss": 0.75, "grad_norm": 1.5}, {"step": 20, "loss": 0.5, "val_loss": 0.625})
    display.refresh()
    text = table(display)
    line = next(line for line in text.splitlines() if "none-seed0" in line)
    assert "20/100" in line
    assert all(value in line for value in ("loss 0.5", "validation 0.625", "gradient 1.5"))
    assert "cs-0.7-seed0" in text


def test_speed_counts_the_steps_of_this_process_only(jobs, monkeypatch):
    now = [100.0]
    log(jobs[0], {"step": 60, "loss": 1.0})  # from an earlier process
    display = Live(jobs, quiet=True)
    task = display.tasks["none-seed0"]
    monkeypatch.setattr(display.progress, "get_time", lambda: now[0])
    monkeypatch.setattr(task, "_get_time", lambda: now[0])
    display.started(jobs[0], Slot("x"))
    display.refresh()
    assert task.completed == 60
    assert task.fields["left"] == ""
    for now[0], step in ((110.0, 70), (120.0, 80)):
        log(jobs[0], {"step": step, "loss": 1.0})
        display.refresh()
    assert task.speed == pytest.approx(1.0)
    assert task.fields["left"] == "0:20 left"
    log(jobs[0], {"step": 100, "loss": 1.0})
    display.refresh()
    assert task.fields["left"] == "measuring"


def test_without_a_terminal_it_prints_plain_lines(jobs, capsys, monkeypatch):
    monkeypatch.setattr(live, "LINES_EVERY", 0.0)
    with Live(jobs) as display:
        display.started(jobs[0], Slot("gpu 0"))
        log(jobs[0], {"step": 10, "loss": 0.75, "grad_norm": 1.5})
        display.refresh()
        display.ended(Ending(jobs[0], 1, ("error: the disk is full",), 61.0))
        display.ended(Ending(jobs[1], 0))
    printed = capsys.readouterr()
    assert printed.out == ""  # --json prints here
    assert printed.err.splitlines() == [
        "none-seed0: started (gpu 0)",
        "none-seed0: step 10 of 100, loss 0.75, gradient 1.5",
        "none-seed0: failed with exit code 1 after 1:01, loss 0.75, gradient 1.5",
        "    error: the disk is full",
        "cs-0.7-seed0: done",
    ]


def test_quiet_prints_nothing(jobs, capsys):
    with Live(jobs, quiet=True) as display:
        display.started(jobs[0], Slot("gpu 0"))
        display.ended(Ending(jobs[0], 1, ("x",)))
    assert capsys.readouterr().err == ""


def test_of_many_runs_the_most_interesting_are_shown(tmp_path):
    many = plan(scaling_variants("digits", "none"), range(50), tmp_path)
    display = Live(many, quiet=True)
    display.ended(Ending(many[49], 1))
    for job in many[:20]:
        display.ended(Ending(job, 0))
    names = [name for name, task in display.tasks.items() if task.visible]
    assert len(names) == live.ROWS
    assert names[-1] == "none-seed49"
    assert "none-seed20" in names
