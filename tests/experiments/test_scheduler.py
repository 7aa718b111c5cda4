"""Real processes that succeed, fail, are killed or are stopped. Small scripts take the place of training."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import pytest

from scalelong.errors import InvalidValueError
from scalelong.experiments import scheduler
from scalelong.experiments.plan import DistanceSpec, plan, scaling_variants
from scalelong.experiments.scheduler import Slot, make_slots
from tiny_runs import TINY, losses

READ = "import json, os, signal, sys, time\njob = json.loads(os.environ['SCALELONG_JOB'])\n"


READY = "open(job['folder'] + '.ready', 'w').close()\n"  # of scripts that have set their signal handlers


def send_when_ready(folder, count, *numbers):
    """Send signals to this process once `count` scripts are ready, half a second apart."""

    def send():
        until = time.monotonic() + 60
        while len(list(folder.glob("*.ready"))) < count and time.monotonic() < until:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()


class Recorder:
    """A display that records its calls."""

    def __init__(self):
        self.events, self.running, self.most = [], 0, 0

    def started(self, job, slot):
        self.events.append(("started", job.name, slot.name))
        self.running += 1
        self.most = max(self.most, self.running)

    def ended(self, ending):
        self.events.append(("ended", ending.job.name))
        self.running -= 1

    def refresh(self):
        pass

    def say(self, line):
        self.events.append(("said", line))


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(script, count=2, scalings="none,uniform,cs", seeds=(0,)):
        monkeypatch.setattr(scheduler, "WORKER", [sys.executable, "-c", READ + script])
        monkeypatch.setattr(scheduler, "POLL", 0.02)
        jobs = plan(scaling_variants("digits", scalings), seeds, tmp_path)
        display = Recorder()
        slots = [Slot(f"slot {k}", {"SLOT": str(k)}) for k in range(count)]
        endings, stopped = scheduler.run_jobs(jobs, slots, tmp_path / "logs", display)
        return {ending.job.variant: ending for ending in endings}, stopped, display

    return run


def test_all_jobs_run_and_never_more_than_there_are_slots(run):
    endings, stopped, display = run("time.sleep(0.1)", scalings="none,uniform,cs,ls")
    assert all(ending.ran for ending in endings.values())
    assert stopped is None
    assert display.most == 2


def test_jobs_that_an_ended_one_made_possible_start_while_others_still_run(tmp_path, monkeypatch):
    script = "time.sleep(0.1 if job['config']['scaling']['kind'] != 'none' else 1.5)"
    monkeypatch.setattr(scheduler, "WORKER", [sys.executable, "-c", READ + script])
    monkeypatch.setattr(scheduler, "POLL", 0.02)
    long, short, *later = plan(scaling_variants("digits", "none,uniform,cs,ls"), (0,), tmp_path)
    display = Recorder()

    def more():
        return [later.pop(0)] if later else []

    endings, _ = scheduler.run_jobs([long, short], [Slot("a"), Slot("b")], tmp_path / "logs", display, more)
    assert [ending.job.variant for ending in endings] == ["none", "uniform", "cs-0.7", "ls"]
    assert all(ending.ran for ending in endings)
    assert display.events[-1] == ("ended", long.name)


def test_a_job_gets_its_config_folder_and_slot(run, tmp_path):
    endings, _, _ = run(
        "os.makedirs(job['folder'])\n"
        "name = os.path.join(job['folder'], os.environ['SLOT'])\n"
        "open(name, 'w').write(job['config']['scaling']['kind'])",
        count=1,
        scalings="none,cs",
    )
    assert all(ending.ran for ending in endings.values())
    assert (tmp_path / "none-seed0" / "0").read_text() == "none"
    assert (tmp_path / "cs-0.7-seed0" / "0").read_text() == "cs"


def test_a_failure_is_reported_with_its_last_lines_and_stops_no_other_job(run):
    endings, _, _ = run("print('starting')\nif job['config']['scaling']['kind'] == 'uniform': sys.exit('disk is full')")
    assert endings["none"].ran
    assert endings["cs-0.7"].ran
    failed = endings["uniform"]
    assert not failed.ran
    assert not failed.stopped
    assert failed.reason() == "failed with exit code 1"
    assert failed.lines == ("starting", "disk is full")


def test_a_killed_job_is_reported_with_its_signal(run):
    endings, _, _ = run("if job['config']['scaling']['kind'] == 'cs': os.kill(os.getpid(), signal.SIGKILL)")
    assert endings["cs-0.7"].reason() == "was killed by SIGKILL"
    assert not endings["cs-0.7"].stopped
    assert endings["none"].ran


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_runs_with_sigterm_and_starts_no_more(run, tmp_path, number):
    """Each script writes a checkpoint on SIGTERM, as training does, and hangs otherwise."""
    send_when_ready(tmp_path, 2, number)
    endings, stopped, display = run(
        "def stop(*_):\n"
        "    open(job['folder'] + '.checkpoint', 'w').close()\n"
        "    sys.exit(128 + 15)\n"
        "signal.signal(signal.SIGTERM, stop)\n" + READY + "time.sleep(60)"
    )
    assert stopped == number
    assert all(ending.stopped for ending in endings.values())
    assert endings["none"].reason() == "was stopped after a checkpoint"
    assert endings["cs-0.7"].reason() == "was not started"  # there were two slots
    assert (tmp_path / "none-seed0.checkpoint").exists()
    assert (tmp_path / "uniform-seed0.checkpoint").exists()
    assert any("resumes" in event[1] for event in display.events if event[0] == "said")


def test_a_second_signal_kills(run, tmp_path):
    send_when_ready(tmp_path, 1, signal.SIGINT, signal.SIGINT)
    before = time.monotonic()
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)"
    endings, stopped, _ = run(ignoring, scalings="none")
    assert stopped == signal.SIGINT
    assert endings["none"].reason() == "was killed by SIGKILL"
    assert time.monotonic() - before < 30


def test_signal_handlers_are_restored(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run("pass", scalings="none")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_finished_run_starts_no_process(run, tmp_path):
    model = tmp_path / "none-seed0" / "model"
    model.mkdir(parents=True)
    steps = scaling_variants("digits", "none")[0].config.train.steps
    (model / "step.json").write_text(f'{{"step": {steps}}}')
    endings, _, display = run("sys.exit(7)", scalings="none")
    assert endings["none"].ran
    assert ("started", "none-seed0", "slot 0") not in display.events


def test_a_display_that_fails_leaves_no_process_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "WORKER", [sys.executable, "-c", READ + "open(job['folder'] + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"])  # fmt: skip  # noqa: E501
    jobs = plan(scaling_variants("digits", "none"), (0,), tmp_path)
    pid = tmp_path / "none-seed0.pid"

    class Broken(Recorder):
        def refresh(self):
            if pid.exists() and pid.read_text():
                raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        scheduler.run_jobs(jobs, [Slot("one")], tmp_path / "logs", Broken())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# -------------------------------------------------------------------------------------------------------- slots


@pytest.fixture
def _no_thread_limit(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("_no_thread_limit")
def test_slots_share_the_cores_and_never_use_more():
    for cores, jobs, limit, slots, threads in [
        (2, 12, None, 2, 1), (2, 1, None, 1, 2), (8, 3, None, 3, 2), (8, 12, 2, 2, 4), (2, 12, 5, 5, 1),
        (1, 4, None, 1, 1),
    ]:  # fmt: skip
        made = make_slots(jobs, limit, gpus=[], cores=cores)
        assert len(made) == slots
        assert {slot.environment["OMP_NUM_THREADS"] for slot in made} == {str(threads)}


def test_the_thread_limit_of_the_user_is_respected(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert make_slots(1, None, gpus=[], cores=8)[0].environment["OMP_NUM_THREADS"] == "1"


def test_each_gpu_runs_one_job():
    made = make_slots(12, None, gpus=["0", "1", "GPU-abc"], cores=8)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in made] == ["0", "1", "GPU-abc"]
    assert len(make_slots(2, None, gpus=["0", "1", "2"], cores=8)) == 2
    doubled = make_slots(12, 4, gpus=["5", "7"], cores=8)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in doubled] == ["5", "7", "5", "7"]


def test_a_run_on_several_gpus_gets_a_group_of_its_own():
    made = make_slots(12, None, gpus=["0", "1", "2", "GPU-abc", "4"], cores=8, per_run=2)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in made] == ["0,1", "2,GPU-abc"]  # one GPU is left over
    assert {slot.environment["OMP_NUM_THREADS"] for slot in made} <= {"1", "2"}  # 8 cores for 2 × 2 processes
    assert [len(make_slots(n, None, gpus=list("01234567"), cores=64, per_run=4)) for n in (1, 2, 9)] == [1, 2, 2]
    command = made[0].command
    assert command[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "scalelong.experiments.worker"
    ]  # fmt: skip
    assert make_slots(1, None, gpus=["3"], cores=8)[0].command == scheduler.WORKER


@pytest.mark.parametrize(("gpus", "per_run"), [([], 2), (["0"], 2), (["0", "1"], 0)])
def test_more_gpus_than_are_visible_are_rejected(gpus, per_run):
    with pytest.raises(InvalidValueError, match=f"--gpus.*{per_run}"):
        make_slots(3, None, gpus=gpus, cores=2, per_run=per_run)


def test_a_launcher_that_ends_after_a_signal_counts_as_stopped(tmp_path, monkeypatch):
    """torchrun exits with 1 once the processes that it forwarded SIGTERM to have ended."""
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n" + READY + "time.sleep(60)"
    monkeypatch.setattr(Slot, "command", [sys.executable, "-c", READ + script])
    monkeypatch.setattr(scheduler, "POLL", 0.02)
    jobs = plan(scaling_variants("digits", "none"), (0,), tmp_path)
    send_when_ready(tmp_path, 1, signal.SIGINT)
    endings, _ = scheduler.run_jobs(jobs, [Slot("two", processes=2)], tmp_path / "logs", Recorder())
    assert endings[0].stopped


@pytest.mark.slow
def test_a_run_on_two_processes_trains_and_is_evaluated_by_both(tmp_path):
    """What happens on two GPUs, here over gloo: torchrun, training, FID's stand-in, one result."""
    settings = [f"{key}={value}" for key, value in TINY.items()]
    variants = scaling_variants("digits-uvit", "none", settings=settings)
    jobs = plan(variants, (0,), tmp_path, DistanceSpec("pixels", 9, 2))
    slot = Slot("two", {"OMP_NUM_THREADS": "1"}, processes=2)
    endings, _ = scheduler.run_jobs(jobs, [slot], tmp_path / "logs", Recorder())
    assert endings[0].ran, endings[0].lines
    folder = jobs[0].folder
    assert json.loads((folder / "config.json").read_text())["processes"] == 2
    card = json.loads((folder / "distance.json").read_text())["card"]
    assert (card["processes"], card["n"]) == (2, 9)
    assert len(losses(folder)) == TINY["train.steps"]


def test_zero_jobs_are_rejected():
    with pytest.raises(InvalidValueError, match="--jobs.*0"):
        make_slots(3, 0, gpus=[], cores=2)
