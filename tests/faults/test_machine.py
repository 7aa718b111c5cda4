"""What the machine does to a run: no memory, no disk, no folder, a rank that dies."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fault_runs import (
    as_arguments,
    check_error,
    finish,
    leftovers,
    losses,
    small_config,
    start,
    wait,
    warnings_as_before,
    weights,
)

from scalelong.files import read_json
from scalelong.training.loop import train
from scalelong.training.trainer import Trainer

STEPS = 8
BALLAST = []


def run(folder, *more, prepare=None, **settings):
    """The train command in a process of its own."""

    def action():
        from scalelong.cli import main

        if prepare is not None:
            prepare()
        with warnings_as_before():
            main([*as_arguments(**{"train__steps": STEPS, **settings}), f"--out={folder}", "-q", *more])

    return action


@pytest.fixture(scope="module")
def whole(imported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine") / "whole"
    assert finish(lambda: train(small_config(train__steps=STEPS), folder, quiet=True)) == 0
    return folder


def check_equal(folder, whole):
    assert losses(folder) == losses(whole)
    assert weights(folder, STEPS) == weights(whole, STEPS)
    assert not leftovers(folder)


def at_step(number, action):
    """Do something to the process right before step `number`."""
    step = Trainer.step

    def changed(trainer):
        if trainer.progress.step + 1 == number:
            action()
        return step(trainer)

    Trainer.step = changed


def load_step(folder):
    """The step of model/, which is written after the checkpoint."""
    return (read_json(folder / "model" / "step.json") or {}).get("step")


# -------------------------------------------------------------------------------------------------- memory


def no_more_memory():
    """What this process has is all it gets, and what is free of it is taken up."""
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    for size in (8 << 20, 1 << 20):
        try:
            while True:
                BALLAST.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            pass
    del BALLAST[-4:]  # so that an error can still be told


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process its size")
@pytest.mark.parametrize("number", [1, 3])
def test_out_of_memory_is_an_error_that_says_what_helps(tmp_path, imported, note, number):
    """The allocator itself gives up (RLIMIT_AS) in front of step N; afterwards the run goes on exactly."""
    large = {"train__batch_size": 256, "train__steps": 3}
    folder, log = tmp_path / "run", tmp_path / "log"
    code = finish(run(folder, prepare=lambda: at_step(number, no_more_memory), **large), log)
    said = check_error(
        code, log.read_text(), "out of memory", "train.accumulate=2", "train.gradient_checkpointing=true"
    )
    assert (f"The checkpoint of step {number - 1} is intact" if number > 1 else "No checkpoint was written yet") in said
    assert finish(run(folder, **large)) == 0
    assert finish(run(tmp_path / "whole", **large)) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    note(
        "the machine",
        f"out of memory at batch {number}",
        1,
        "an error that names accumulation and checkpointing; the run then resumed exactly",
    )


# ---------------------------------------------------------------------------------------------------- disk


def small_files():
    """Files end at 20 kB, as on a disk that is full: writes fail in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def test_a_write_that_fails_in_the_middle_is_an_error_and_costs_nothing(tmp_path, whole):
    folder, log = tmp_path / "run", tmp_path / "log"
    code = finish(run(folder, prepare=lambda: at_step(4, small_files)), log)
    said = check_error(code, log.read_text(), str(folder))
    # The checkpoint of step 3 is written while step 4 runs: the limit may hit it or the next one.
    assert any(f"The checkpoint of step {step} is intact" in said for step in (2, 3))
    assert finish(run(folder)) == 0
    check_equal(folder, whole)


@contextmanager
def small_disk(place, size):
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True
    )
    assert mounted.returncode == 0, f"this test mounts a small disk and needs the right to: {mounted.stderr}"
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place, option):
    subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_costs_nothing(tmp_path, whole, note):
    place, log, tried = tmp_path / "disk", tmp_path / "log", 0
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
    with small_disk(place, "64m"):
        for k in range(20):  # full at another moment each time
            folder = place / f"run-{k}"
            remount(place, f"size={(k + 1) * needed // 14 // 4096 * 4096 + 4096}")
            code = finish(run(folder), log)
            if code != 0:
                check_error(code, log.read_text(), "No space left on device")
                tried += 1
            remount(place, "size=64m")
            assert finish(run(folder)) == 0
            check_equal(folder, whole)
            shutil.rmtree(folder)
    assert tried >= 8
    note(
        "the machine",
        "the disk is full (a small tmpfs)",
        tried,
        "an error; with free space again the run resumed exactly",
    )


@pytest.mark.slow
def test_a_folder_that_turns_read_only_is_an_error_and_costs_nothing(tmp_path, whole, note):
    place, log = tmp_path / "disk", tmp_path / "log"
    with small_disk(place, "64m"):
        folder = place / "run"
        assert finish(run(folder, train__steps=3)) == 0
        remount(place, "ro")
        check_error(finish(run(folder), log), log.read_text(), "Read-only file system")
        remount(place, "rw")
        assert finish(run(folder)) == 0
        check_equal(folder, whole)
    note("the machine", "the folder is read-only", 1, "an error; once writable again the run resumed exactly")


def test_a_folder_that_vanishes_stops_the_run_and_does_not_come_back_in_half(tmp_path, whole, note):
    folder, log = tmp_path / "run", tmp_path / "log"

    def remove():
        while load_step(folder) != 3 or (folder / ".model-old").exists():  # what was being written is complete
            time.sleep(0.01)
        shutil.rmtree(folder)

    code = finish(run(folder, prepare=lambda: at_step(4, remove)), log)
    check_error(code, log.read_text(), str(folder), "was removed")
    assert not (folder / "checkpoints").exists()
    assert finish(run(folder)) == 0
    check_equal(folder, whole)
    note(
        "the machine",
        "the folder is removed during training",
        1,
        "an error and no partial folder; a new run is exact",
        "what was removed",
    )


# ------------------------------------------------------------------------------------------- two processes


def test_of_two_processes_on_one_folder_one_trains_and_one_is_refused(tmp_path, whole, note):
    folder, log, other = tmp_path / "run", tmp_path / "log", tmp_path / "other"
    for _ in range(3):
        first, second = start(run(folder), log), start(run(folder), other)
        codes = [wait(first), wait(second)]
        for code, said in zip(codes, (log, other), strict=True):
            if code != 0:
                check_error(code, said.read_text(), "in use by another process")
        assert 0 in codes
        check_equal(folder, whole)
        shutil.rmtree(folder)
    note(
        "the machine",
        "two processes start on one folder",
        3,
        "one trains; the other is refused with the owner, or finds the run finished",
    )


def children(process):
    """The numbers of a process's children, in the order of their start."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return sorted(map(int, found))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_dies_under_torchrun_is_started_again_and_the_run_ends_right(tmp_path, note, rank):
    folder, steps, log = tmp_path / "run", 40, tmp_path / "log"
    torchrun = str(Path(sys.executable).parent / "torchrun")
    launch = [torchrun, "--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    arguments = [*as_arguments(train__steps=steps), f"--out={folder}", "-q"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it gloo was seen to hang after the restart
    with open(log, "w") as said:
        process = subprocess.Popen([*launch, "-m", "scalelong", *arguments], env=environment, stdout=said, stderr=said)
        try:
            until = time.monotonic() + 600  # a busy machine takes minutes to start two processes
            while len(losses(folder)) < 5:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < until
                time.sleep(0.01)
            os.kill(children(process.pid)[rank], signal.SIGKILL)
            before = len(losses(folder))
            code = process.wait(timeout=900)
        finally:
            process.terminate()  # torchrun ends its processes
            process.wait(timeout=60)
    assert before < steps, "the run ended before it could be hit"
    assert code == 0, log.read_text()[-3000:]
    assert finish(lambda: train(small_config(train__steps=steps), tmp_path / "one", quiet=True)) == 0
    assert [step for step, *_ in losses(folder)] == list(range(1, steps + 1))
    for (step, a, _), (_, b, _) in zip(losses(tmp_path / "one"), losses(folder), strict=True):
        assert b == pytest.approx(a, abs=1e-5 if step <= 10 else 1e-4)
    note(
        "the machine",
        f"rank {rank} of 2 is killed under torchrun --max-restarts",
        1,
        "restarted; every step once, losses equal to one process within 1e-4",
    )
    note("the same again", "two processes instead of one", 1, "losses equal to 1e-5 for 10 steps, to 1e-4 for 40")
