"""Real processes that end well, fail, are killed or are stopped. Small scripts stand in for training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from scalelong.experiments import scheduler
from scalelong.experiments.plan import plan, scaling_variants
from scalelong.experiments.slots import Slot

READ = "import json, os, signal, sys, time\njob = json.loads(sys.stdin.buffer.readline())\n"


class Quiet:
    """Notes what the scheduler tells."""

    def __init__(self):
        self.events, self.running, self.most = [], 0, 0

    def started(self, job, slot):
        self.events.append(("started", job.name, slot.name))
        self.running += 1
        self.most = max(self.most, self.running)

    def ended(self, ending):
        self.events.append(("ended", ending.job.name))
        self.running -= 1

    def look(self):
        pass

    def say(self, line):
        self.events.append(("said", line))


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(script, slots=2, scalings="none,uniform,cs", seeds=(0,)):
        monkeypatch.setattr(scheduler, "WORKER", [sys.executable, "-c", READ + script])
        monkeypatch.setattr(scheduler, "POLL", 0.02)
        jobs = plan(scaling_variants("digits", scalings), seeds, tmp_path)
        watcher = Quiet()
        places = [Slot(f"slot {k}", {"PLACE": str(k)}) for k in range(slots)]
        endings, stopped = scheduler.run_jobs(jobs, places, tmp_path / "logs", watcher)
        return {ending.job.variant: ending for ending in endings}, stopped, watcher

    return run


def test_all_run_and_never_more_than_there_are_slots(run):
    endings, stopped, watcher = run("time.sleep(0.1)", scalings="none,uniform,cs,ls")
    assert all(ending.ran for ending in endings.values())
    assert stopped is None
    assert watcher.most == 2


def test_a_job_gets_its_config_folder_and_place(run, tmp_path):
    endings, _, _ = run(
        "os.makedirs(job['folder'])\n"
        "name = os.path.join(job['folder'], os.environ['PLACE'])\n"
        "open(name, 'w').write(job['config']['scaling']['kind'])",
        slots=1,
        scalings="none,cs",
    )
    assert all(ending.ran for ending in endings.values())
    assert (tmp_path / "none-seed0" / "0").read_text() == "none"
    assert (tmp_path / "cs-0.7-seed0" / "0").read_text() == "cs"


def test_a_failure_is_told_by_name_with_its_last_lines_and_stops_nobody_else(run):
    endings, _, _ = run("print('starting')\nif job['config']['scaling']['kind'] == 'uniform': sys.exit('disk is full')")
    assert endings["none"].ran
    assert endings["cs-0.7"].ran
    failed = endings["uniform"]
    assert not failed.ran
    assert not failed.stopped
    assert failed.reason() == "failed with exit code 1"
    assert failed.lines == ("starting", "disk is full")


def test_a_killed_job_is_told_by_its_signal(run):
    endings, _, _ = run("if job['config']['scaling']['kind'] == 'cs': os.kill(os.getpid(), signal.SIGKILL)")
    assert endings["cs-0.7"].reason() == "was killed by SIGKILL"
    assert not endings["cs-0.7"].stopped
    assert endings["none"].ran


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_with_sigterm_and_starts_no_more(run, tmp_path, number):
    """Each stand-in writes a checkpoint on SIGTERM, as training does, and would hang otherwise."""
    threading.Timer(0.6, os.kill, (os.getpid(), number)).start()
    endings, stopped, watcher = run(
        "def stop(*_):\n"
        "    open(job['folder'] + '.checkpoint', 'w').close()\n"
        "    sys.exit(128 + 15)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "time.sleep(60)"
    )
    assert stopped == number
    assert all(ending.stopped for ending in endings.values())
    assert endings["none"].reason() == "was stopped after a checkpoint"
    assert endings["cs-0.7"].reason() == "was not started"  # there were two slots
    assert (tmp_path / "none-seed0.checkpoint").exists()
    assert (tmp_path / "uniform-seed0.checkpoint").exists()
    assert any("the same command goes on" in event[1] for event in watcher.events if event[0] == "said")


def test_a_second_signal_kills(run):
    for delay in (0.5, 0.9):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = time.monotonic()
    endings, stopped, _ = run("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", scalings="none")
    assert stopped == signal.SIGINT
    assert endings["none"].reason() == "was killed by SIGKILL"
    assert time.monotonic() - before < 30


def test_handlers_are_as_they_were_afterwards(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("pass", scalings="none")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_finished_run_starts_no_process(run, tmp_path):
    model = tmp_path / "none-seed0" / "model"
    model.mkdir(parents=True)
    steps = scaling_variants("digits", "none")[0].config.train.steps
    (model / "step.json").write_text(f'{{"step": {steps}}}')
    endings, _, watcher = run("sys.exit(7)", scalings="none")
    assert endings["none"].ran
    assert ("started", "none-seed0", "slot 0") not in watcher.events


def test_a_watcher_that_breaks_leaves_no_process_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "WORKER", [sys.executable, "-c", READ + "open(job['folder'] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"])  # fmt: skip  # noqa: E501
    jobs = plan(scaling_variants("digits", "none"), (0,), tmp_path)
    note = tmp_path / "none-seed0.pid"

    class Broken(Quiet):
        def look(self):
            if note.exists() and note.read_text():
                raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        scheduler.run_jobs(jobs, [Slot("one")], tmp_path / "logs", Broken())
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
