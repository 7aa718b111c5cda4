"""Strange command lines of every command: each is refused in one sentence, before any work, and writes nothing."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from fault_runs import check_error, command_line, places, planted, small_config, warnings_as_before
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scalelong.cli import main
from scalelong.data.images import save_grid
from scalelong.evaluation import Card, Evaluation, Generation, Interval, MetricValue, ReferenceCard
from scalelong.report import write_report
from scalelong.training.loop import train

# RUN is a run folder, HERE a folder of the test's own. None of these lines may succeed.
LINES = """
train --steps 0
train --steps -5
train --steps 99999999999999999999999
train --batch-size 0
train --batch-size 3.5
train --seed -1
train --seed 99999999999999999999999999
train --out /dev/null
train --out /dev/null/x
train --out RUN/config.json
train --scaling ''
train --scaling ../x
train --scaling cs --kappa inf
train --scaling cs --kappa 0
train --scaling none --kappa 0.5
train --set train
train --set =
train --set train.lr=
train --set train.lr=nan
train --set train.lr=-1
train --set model.depth=-3
train --set model.num_heads=7
train --set model.embed_dim=0
train --set scaling.kind=x
train --set scaling=5
train --set tracker=mlflow
train --set checkpoint.every=0
train --set diffusion.process=sine
train --set train.precision=fp8
train --set sample.sampler=x --out HERE/x
train --set sample.steps=0 --out HERE/x
train --set sample.guidance=3 --out HERE/x
train --data /etc/passwd
train --data HERE
train --data ''
train --data hf:
train --data hf:../../etc
train --data http://example.com/x.zip
train cifar10
train digits digits
train --nonsense
train --out
sample
sample HERE
sample ''
sample RUN/config.json
sample RUN -n 0
sample RUN -n x
sample RUN --steps 0
sample RUN --out /dev/null/x.png
sample RUN --out RUN/config.json
sample RUN --guidance nan
sample RUN --class nine
sample RUN --prompt 'a cat'
sample RUN --sampler DDIM
sample RUN --precision fp8
sample RUN --device gpu
sample RUN --seed -4
sample RUN --first 9223372036854775807
sample RUN --batch-size 0
report
report HERE
report / --out /
report RUN --out RUN
report RUN --out /dev/null/x
report RUN HERE/none
evaluate
evaluate HERE
evaluate RUN -n 0
evaluate RUN --extractor inceptoin
evaluate RUN --extractor pixels --weights /etc/passwd
evaluate RUN --sampler x
evaluate RUN --steps 0
evaluate RUN --precision x
evaluate RUN --device x
evaluate RUN --batch-size -1
evaluate RUN --out /dev/null/x
evaluate RUN RUN
evaluate RUN RUN --compare
evaluate --compare
evaluate RUN --vary x
evaluate --images HERE
evaluate --images HERE/none --reference digits
evaluate RUN --images HERE
compare nothing
compare --scalings ''
compare --scalings none,nnone
compare --scalings none,none
compare --scalings cs:abc
compare --scalings cs:-1
compare --scalings none,cs:0.5:3
compare --seeds 0
compare --seeds -1
compare --seeds x
compare --seeds 99999999
compare --seeds 99999999999999999999,2
compare --steps 0
compare --jobs 0
compare --distance fid
compare --samples -1
compare --set seed=4
compare --set x
compare --kappa nan
kappa
kappa --data digits
kappa --data digits --skips 0
kappa --data nowhere --skips 3
kappa --data digits --skips 3 --process x
kappa --data digits --skips 3 --samples 0
kappa --data digits --skips 3 --figure HERE/x.xyz
kappa --data digits --skips 3 --figure /dev/null/x.png
kappa --data digits --skips 3 --image-size -8
theory --seeds 1
theory --width 31
theory --kappa nan
theory --kappa -1
theory --out HERE/x.xyz
theory --out /dev/null/x.png
robustness
robustness HERE
robustness RUN --variance -1
robustness RUN --variance nan
robustness RUN --variance x
robustness RUN --images 0
robustness RUN --samples -1
robustness RUN --bins 0
robustness RUN --points -1
robustness RUN --extractor x
robustness RUN --out HERE/x.xyz
bench nothing
bench --rounds 1
bench digits --out /dev/null/x
bench digits --plot HERE/x.xyz
data
data nothing
data info
data info nothing
data info digits --grid HERE/x.xyz
data prepare
data prepare HERE
data prepare digits --image-size 0
data prepare digits --image-size 100000
data prepare digits --channels 2
data prepare digits --background nocolour
data prepare digits --holdout nan
data prepare digits --split nothing
data prepare digits --split ''
data prepare digits --config x
data prepare cifar10 --from HERE/none
data prepare cifar10 --from /etc/passwd
data prepare cifar10 --from RUN
data stats digits -n 0 --extractor x
data stats digits --extractor pixels --out HERE/x
presets nothing
presets ''
presets digits digits
doctor x
nothing
--nothing
""".strip().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "run"
    train(small_config(train__steps=1), folder, quiet=True)
    return folder


def refuse(capsys, tmp_path, monkeypatch, run, lines):
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    for line in lines:
        words = [word.replace("RUN", str(run)).replace("HERE", str(here)) for word in shlex.split(line)]
        code, err = command_line(capsys, *words)
        if code == 2:  # the command line itself is wrong: a usage box
            assert "Error" in err or line == "data", (line, err)
            assert "Traceback" not in err, line
        else:
            check_error(code, err)
        shutil.rmtree(here / "x", ignore_errors=True)  # what was asked for is recorded before it is looked at
        assert not list(here.iterdir()), line
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_some_malformed_command_lines_are_refused_with_an_error(capsys, tmp_path, monkeypatch, run):
    refuse(capsys, tmp_path, monkeypatch, run, LINES[::8])


@pytest.mark.slow
def test_every_malformed_command_line_is_refused_with_an_error(capsys, tmp_path, monkeypatch, run, note):
    refuse(capsys, tmp_path, monkeypatch, run, LINES)
    commands = len({line.split()[0] for line in LINES})
    note(
        "malformed input",
        f"malformed command lines of {commands} commands",
        len(LINES),
        "refused with one line before any work; nothing written",
    )


# --------------------------------------------------------------------------- names that look like a terminal's markup

MARKUP = "[/b] :train: [red]x"


def test_a_run_named_like_markup_is_shown_as_it_is(capsys, tmp_path, run):
    """Brackets style text in the library that draws our tables, and :train: is a picture of a tram there."""
    folder = tmp_path / MARKUP
    shutil.copytree(run, folder)
    for words in (
        ["sample", folder, "--n=1", "--steps=1", "--device=cpu"],
        ["report", folder],
        ["robustness", folder, "--images=2", "--samples=0", "--points=0", "--bins=1"],
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left, warnings_as_before():
            main([str(word) for word in words])
        said = capsys.readouterr().out
        assert not left.value.code
        assert MARKUP in said.replace("\n", ""), said


def test_a_name_that_is_not_text_is_refused_before_training(capsys):
    """safetensors cannot open such a folder: the first checkpoint would have been the end of the run."""
    code, err = command_line(capsys, "train", "--out=\udcff\udcfe")
    check_error(code, err, "valid UTF-8")


@pytest.mark.slow
def test_a_terminal_without_greek_letters_shows_escapes():
    """On such a terminal a table of κ was an error after all the work."""
    words = [sys.executable, "-m", "scalelong", "kappa", "--data=digits", "--skips=3", "--samples=50"]
    done = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"\u03ba for 3 long skips" in done.stdout


def test_progress_of_what_is_named_like_markup_is_shown(capsys, monkeypatch):
    from scalelong.progress import track
    from scalelong.training.display import Display

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    display = Display(MARKUP, 2, 0, 1)
    display.terminal = True
    with display:
        display.say(MARKUP)
    assert list(track([1, 2], MARKUP)) == [1, 2]
    assert MARKUP in capsys.readouterr().err


# ------------------------------------------------------------------------------- figures that somebody wrote by hand


def evaluation():
    reference = ReferenceCard("digits", "train", 9, "c" * 64, (8, 8, 1), "x", "w" * 64, "none", 1.0, "now", {"a": "1"})
    card = Card(
        metric="FID", n=9, images=MARKUP, content="d" * 64, image=(8, 8, 1), reference=reference, extractor="x",
        weights="w" * 64, width=4, resize="none", generation=Generation(),
        processes=1, seconds=1.0, created="now", versions={"a": "1"}, notes=(MARKUP,),
    )  # fmt: skip
    values = {"fid": MetricValue(3.0, Interval(2.0, 4.0, 0.95, 10)), "kid": MetricValue(0.1, None, {"spread": 0.01})}
    return Evaluation(values, card).to_dict()


VALUES = st.sampled_from(
    [None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", MARKUP, "<b>", [], {}, [None], {"a": {}}, [[1]]]
)
GOOD = json.loads(json.dumps(evaluation()))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from(list(places(GOOD))), other=VALUES)
@example(place=("metrics", "fid", "value"), other=10**400)
def test_any_evaluation_is_ranked_or_refused(capsys, tmp_path, place, other):
    for name, value in (("a.json", GOOD), ("b.json", planted(GOOD, place, other))):
        (tmp_path / name).write_text(json.dumps(value))
    code, err = command_line(capsys, "evaluate", tmp_path / "a.json", tmp_path / "b.json", "--compare")
    if code:
        check_error(code, err)


ROBUSTNESS = {
    "format": 1,
    "edges": [0.0, 1.0],
    "metric": "x",
    "sensitivity": [{"variance": v, "overall": {"change": 1.0, "gain": 1.0, "loss": 0.4}} for v in (0.0, 0.1)],
    "distances": [{"variance": 0.0, "value": 2.0, "low": 1.0, "high": 3.0}],
    "lipschitz": [{"network": 2.0}],
}
FILES = {"evaluation.json": GOOD, "distance.json": GOOD, "robustness.json": ROBUSTNESS,
         "resources.json": {"cpu_seconds": 1.0, "peak_memory": 1.0}}  # fmt: skip


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    where=st.sampled_from([(name, place) for name, value in FILES.items() for place in places(value)]),
    other=VALUES,
)
def test_any_figures_in_a_run_folder_leave_the_report_readable(tmp_path_factory, run, where, other):
    folder = tmp_path_factory.getbasetemp() / "written-by-hand"
    if not folder.exists():
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
        save_grid(np.zeros((2, 8, 8, 1), np.uint8), folder / "samples" / "step-00000001.png")
    for name, value in FILES.items():
        (folder / name).write_text(json.dumps(planted(value, where[1], other) if name == where[0] else value))
    page = write_report([folder], folder / "page.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert "<b>" not in page
