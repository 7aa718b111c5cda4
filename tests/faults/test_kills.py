"""SIGKILL at any moment, inside the writing of a checkpoint too: the run goes on as if nothing had been."""

import os
import random
import shutil
import signal
import tempfile
import time

import pytest
from fault_runs import finish, leftovers, losses, small_config, start, wait, weights

from scalelong.runs.logs import JsonLines
from scalelong.runs.run import Run, load_run
from scalelong.training import checkpoint
from scalelong.training.loop import train

STEPS = 24
# Where a process may be when it is killed, besides anywhere at all.
POINTS = {
    "rename": (os, "rename"),
    "replace": (os, "replace"),
    "fsync": (os, "fsync"),
    "create a temporary folder": (tempfile, "mkdtemp"),
    "remove an old checkpoint": (shutil, "rmtree"),
    "write tensors": (checkpoint, "save_file"),
    "hash tensors": (checkpoint, "sha256"),
    "in the middle of a log line": (JsonLines, "write"),
}


def config():
    return small_config(train__steps=STEPS, monitor__every=4)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(function, call, before, tear):
    """`function`, which at its `call`-th call kills the process before, after or (a log) in the middle of its work."""
    count = 0

    def wrapped(*args, **options):
        nonlocal count
        count += 1
        if count == call and tear:
            log, entry = args
            log.sync()
            with open(log.path, "a") as file:
                file.write(repr(entry)[: count * 7])
            die()
        if count == call and before:
            die()
        answer = function(*args, **options)
        if count == call:
            die()
        return answer

    return wrapped


def trained(folder, point=None, call=1, before=True):
    def action():
        if point is not None:
            owner, name = POINTS[point]
            tear = point == "in the middle of a log line"
            setattr(owner, name, deadly(getattr(owner, name), call, before, tear))
        train(config(), folder, quiet=True)

    return action


@pytest.fixture(scope="module")
def whole(imported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills") / "whole"
    assert finish(trained(folder)) == 0
    return folder


def newest_step(folder):
    state, _ = checkpoint.newest(Run(folder).checkpoints_path)
    return 0 if state is None else state.progress.step


def check_equal(folder, whole):
    assert losses(folder) == losses(whole)
    assert weights(folder, STEPS) == weights(whole, STEPS)
    assert load_run(folder).step == STEPS
    assert not leftovers(folder)


def kill_many(tmp_path, whole, kills, seed):
    """Kill a run again and again until it is through, then another; returns (points hit, kills at any moment)."""
    rng = random.Random(seed)
    points, hit, anywhere, runs = list(POINTS), [], 0, 0
    rng.shuffle(points)
    folder, reached = tmp_path / "run-0", 0
    while len(hit) + anywhere < kills:
        if rng.random() < 0.7:
            point, call, before = points[len(hit) % len(points)], rng.randint(1, 12), rng.random() < 0.5
            code = finish(trained(folder, point, call, before))
            hit += [point] if code == -signal.SIGKILL else []
        else:
            child = start(trained(folder))
            time.sleep(rng.random() * 0.8)
            os.kill(child, signal.SIGKILL)
            code = wait(child)
            anywhere += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        assert newest_step(folder) >= reached, "a checkpoint was lost"
        reached = newest_step(folder)
        if code == 0:
            check_equal(folder, whole)
            runs += 1
            folder, reached = tmp_path / f"run-{runs}", 0
    assert finish(trained(folder)) == 0
    check_equal(folder, whole)
    return hit, anywhere


def test_a_few_kills_leave_no_trace(tmp_path, whole):
    kill_many(tmp_path, whole, kills=3, seed=1)


@pytest.mark.slow
def test_a_hundred_kills_leave_no_trace(tmp_path, whole, note):
    hit, anywhere = kill_many(tmp_path, whole, kills=120, seed=2)
    same = "the same command resumed; all losses and the last checkpoint equal an undisturbed run bit for bit"
    for point in POINTS:
        assert hit.count(point) >= 3, point
        note("a process is killed (SIGKILL)", f"at the call: {point}", hit.count(point), same)
    note("a process is killed (SIGKILL)", "at a random moment", anywhere, same)


@pytest.mark.parametrize(("point", "call"), [("rename", 1), ("create a temporary folder", 2), ("rename", 3)])
def test_a_kill_after_the_last_step_does_not_leave_an_old_network_behind(tmp_path, whole, point, call):
    """The last checkpoint stands, the network in model/ does not yet: the finished run puts that right."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
    (folder / "model" / "step.json").write_text(f'{{"step": {STEPS - 1}}}')
    # One rename puts the checkpoint in place, three more the network.
    assert finish(trained(folder, point, call, before=False)) == -signal.SIGKILL
    assert newest_step(folder) == STEPS
    assert finish(trained(folder)) == 0
    check_equal(folder, whole)
