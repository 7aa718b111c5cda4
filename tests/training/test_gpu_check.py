"""`scalelong doctor --gpu`, as far as a CPU can run it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from scalelong.cli import info
from scalelong.runs.config import TrainConfig
from scalelong.training import gpu_check
from scalelong.training.gpu_check import Check
from scalelong.training.parallel import make_accelerator


def test_nothing_waits_between_logs():
    checks = gpu_check._waits()
    assert [check.passed for check in checks] == [True, True, True]
    assert {check.found for check in checks} == {"0"}


def test_the_report_names_the_device_that_accelerate_trains_on(monkeypatch):
    monkeypatch.setattr(gpu_check, "make_accelerator", lambda train: SimpleNamespace(device=torch.device("mps")))
    assert gpu_check._device() == "these checks ran on mps, not on a CUDA GPU"


@pytest.mark.parametrize(("hidden", "found"), [({}, "mps"), (gpu_check.HIDDEN, "the CPU")], ids=["here", "cpu"])
def test_the_losses_of_the_cpu_are_computed_on_the_cpu_also_on_a_mac(hidden, found):
    mac = "import torch; torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True; "
    code = mac + "from scalelong.training import gpu_check; print(gpu_check._device())"
    there = subprocess.run([sys.executable, "-c", code], env={**os.environ, **hidden}, capture_output=True, text=True)
    assert there.stdout.startswith(f"these checks ran on {found},"), there.stderr


def test_doctor_lists_no_precision_that_training_refuses_on_a_mac(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    mps = next(device for device in info._devices() if device["device"] == "mps")
    assert mps["precision"]
    for precision in mps["precision"]:
        make_accelerator(TrainConfig(precision=precision))  # raises for fp16, which needs CUDA


def test_a_check_that_breaks_is_a_failure_and_the_others_still_run(monkeypatch):
    monkeypatch.setattr(gpu_check, "_losses", lambda: 1 / 0)
    for name in ("_waits", "_graphs"):
        monkeypatch.setattr(gpu_check, name, lambda: [Check("fine", "0", True)])
    monkeypatch.setattr(gpu_check, "_parts", lambda: [Check("time", "1 ms", None)])
    checks = gpu_check.run_checks()
    assert [check.passed for check in checks] == [None, False, True, True, None]
    page = gpu_check.report(checks)
    assert "ZeroDivisionError" in page
    assert "| FAILED |" in page


@pytest.mark.slow
def test_all_checks_pass_on_a_cpu():
    assert not [check for check in gpu_check.run_checks() if check.passed is False]
