"""What training cost: without what came before it, with what else ran, and the failure that ended it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from scalelong.runs.resources import ran_alone, recorded
from scalelong.runs.run import Run

BURN = "import time\nuntil = time.process_time() + 30\nwhile time.process_time() < until: pass"


def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak")
def test_memory_of_the_preparation_does_not_count(tmp_path):
    np.ones(400 << 20, np.uint8).sum()  # freed at once
    run = Run(tmp_path)
    with recorded(run):
        np.ones(50 << 20, np.uint8).sum()
    small = run.resources["peak_memory"]
    with recorded(run):
        np.ones(250 << 20, np.uint8).sum()
    assert 150 << 20 < run.resources["peak_memory"] - small < 250 << 20
    assert run.resources["processes"] == 2


def test_cpu_time_is_that_of_the_block_and_adds_up(tmp_path):
    run = Run(tmp_path)
    burn(0.3)
    for _ in range(2):
        with recorded(run):
            burn(0.2)
    assert 0.4 <= run.resources["cpu_seconds"] < 0.6


def test_a_run_beside_another_process_was_not_alone(tmp_path):
    run = Run(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        with recorded(run):
            time.sleep(1)
    finally:
        other.kill()
        other.wait()
    assert run.resources["other_cpu_seconds"] > 0.2
    assert not ran_alone(run.resources)


def test_a_failure_is_recorded_until_the_run_is_resumed(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(ValueError, match="nan"), recorded(run):
        raise ValueError("the loss of step 7 is nan")
    assert run.failure == "the loss of step 7 is nan"
    assert "failure" not in run.resources
    with recorded(run):
        pass
    assert run.failure is None


def test_whether_a_run_was_alone_is_unknown_without_a_record():
    assert not ran_alone({})
    assert not ran_alone({"wall_seconds": 10.0})
    assert ran_alone({"wall_seconds": 10.0, "other_cpu_seconds": 0.9})
    assert not ran_alone(json.loads('{"wall_seconds": 10.0, "other_cpu_seconds": 1.1}'))
