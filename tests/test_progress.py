"""What fits beside step and time left."""

import pytest

from scalelong import progress
from scalelong.progress import Tracker, duration, fit, track

VALUES = ("loss 0.1234", "gradient 0.567", "1234 images/s")


@pytest.mark.parametrize("columns", range(1, 140))
@pytest.mark.parametrize("name", ["x", "uniform-seed0", "features of samples of cifar10-tiny-cs-0.7-seed0"])
def test_a_line_never_exceeds_its_columns(columns, name):
    fitted = fit(columns, name, VALUES, len(name))
    used = len(fitted.name) + (fitted.bar + 1 if fitted.bar else 0) + sum(len(value) + 2 for value in fitted.values)
    assert used <= max(columns, progress.SHORTEST_NAME)


def test_names_line_up_and_long_ones_keep_both_ends():
    assert len(fit(80, "a", (), 10).name) == len(fit(80, "abcdefghij", (), 10).name) == 10
    cut = fit(20, "cifar10-tiny-unet-cs-0.7-seed3", (), 30).name
    assert cut.startswith("cifar10")
    assert cut.endswith("seed3")
    assert len(cut) == 20


def test_the_first_values_are_kept():
    assert fit(200, "run", VALUES, 3).values == VALUES
    assert fit(20, "run", VALUES, 3).values == VALUES[:1]


def test_durations():
    assert [duration(s) for s in (0.4, 65, 3725)] == ["0:00", "1:05", "1:02:05"]


def test_without_a_terminal_lines_say_how_long_it_takes(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Tracker("sampling", 10) as tracker:
        for now[0] in (6.0, 12.0, 18.0):
            tracker.advance()
    assert capsys.readouterr().err == "sampling: 2 of 10, 0:48 left\n"
    assert list(track([1, 2], "x")) == [1, 2]
