"""`scalelong doctor --gpu`, as far as a CPU can run it."""

import pytest

from scalelong.training import gpu_check
from scalelong.training.gpu_check import Check


def test_nothing_waits_between_logs():
    checks = gpu_check._waits()
    assert [check.passed for check in checks] == [True, True]
    assert {check.found for check in checks} == {"0"}


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
