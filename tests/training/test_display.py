"""Progress of a run without a terminal."""

from types import SimpleNamespace

from scalelong.training.display import Display


def test_without_a_terminal_progress_is_plain_lines(capsys):
    outcome = SimpleNamespace(loss=0.5, grad_norm=1.25)
    with Display("run", steps=3, done=0, batch_size=8) as display:
        for step in (1, 2, 3):
            display.step(step, outcome)
    written = capsys.readouterr()
    (line,) = written.err.splitlines()  # the first steps are too soon for a line
    assert line.startswith("run: step 3 of 3, 0:00 left, loss 0.5000, gradient 1.250, ")
    assert written.out == ""


def test_quiet_prints_nothing(capsys):
    with Display("run", steps=1, done=0, batch_size=8, quiet=True) as display:
        display.step(1, SimpleNamespace(loss=0.5, grad_norm=1.25))
        display.say("x")
    assert capsys.readouterr().err == ""
