"""Commands in a fresh process: what they import, what they print, and how they look in terminals of 60 and 120 columns.

A warm process hides slow imports and missing ones, so each test here starts its own.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
import typer

from scalelong.cli import _names, main
from tiny_runs import TINY, tiny_settings

HEAVY = ("torch", "diffusers", "accelerate", "transformers", "peft", "scipy", "sklearn", "matplotlib", "datasets")
NETWORKS = {"torch", "diffusers", "accelerate", "transformers"}  # diffusers imports the last two itself where they are
CODE = f"""
import atexit, json, os, sys
def report():
    found = sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r}))
    with open(os.environ["IMPORTS"], "w") as file:
        json.dump(found, file)
atexit.register(report)
from scalelong.cli import main
main()
"""


TINY_OPTIONS = [f"--set={key}={value}" for key, value in TINY.items() if key != "train.steps"]


class Done:
    """A finished command: exit code, output, and the heavy packages that it imported."""

    def __init__(self, folder, *arguments, environment=None):
        imports = folder / "imports.json"
        done = subprocess.run(
            [sys.executable, "-c", CODE, *map(str, arguments)], capture_output=True, text=True, timeout=300,
            cwd=folder, env={**os.environ, "IMPORTS": str(imports), **(environment or {})},
        )  # fmt: skip
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.imported = json.loads(imports.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from scalelong.training import override, preset, train

    folder = tmp_path_factory.mktemp("fresh") / "run"
    train(override(preset("digits-uvit-class"), tiny_settings(train__steps=2)), folder, quiet=True)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("train", "digitss"),
        ("train", "digits", "--set", "train.lrr=1"),
        ("train", "digits", "--scaling", "sc:0.5"),
        ("compare", "digits", "--scalings", "none,sc"),
        ("compare", "digits", "--distance", "pixel"),
        ("sample", "RUN", "--sampler", "dimm"),
        ("sample", "RUN", "--precision", "fp31"),
        ("sample", "RUN", "--out", "grid.jpg"),
        ("evaluate", "RUN", "--sampler", "dimm"),
        ("evaluate", "RUN", "--extractor", "inceptoin"),
        ("kappa", "--data", "digits", "--skips", "6", "--process", "dppm"),
    ],
    ids=" ".join,
)
def test_a_wrong_name_fails_before_anything_heavy_is_imported(words, trained, tmp_path):
    done = Done(tmp_path, *(trained if word == "RUN" else word for word in words))
    assert done.code == 1
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert done.imported == []


def test_a_finished_run_is_recognised_without_torch(trained, tmp_path):
    done = Done(tmp_path, "train", "digits-uvit-class", *TINY_OPTIONS, "--steps=2", "--out", trained)
    assert (done.code, done.imported) == (0, [])
    assert "finished" in done.err


def test_sampling_says_what_it_did_and_leaves_out_what_diffusers_imports_only_because_it_is_there(trained, tmp_path):
    done = Done(tmp_path, "sample", trained, "--n=3", "--steps=2", "--out=grid.png", "--json")
    assert done.code == 0, done.err
    assert set(done.imported) <= NETWORKS
    answer = json.loads(done.out)
    assert (answer["path"], answer["n"], answer["sampler"], answer["steps"]) == ("grid.png", 3, "dpm-solver-fast", 2)
    assert answer["seconds"] > 0
    assert (tmp_path / "grid.png").is_file()


def test_sampling_a_unet_needs_no_more(tmp_path):
    from scalelong.training import override, preset, train

    few = {key: value for key, value in tiny_settings(train__steps=1).items() if not key.startswith("model.")}
    config = override(preset("digits"), {**few, "model.channels": (32, 32), "model.layers": 1})
    train(config, tmp_path / "run", quiet=True)
    done = Done(tmp_path, "sample", "run", "--n=2", "--steps=2")
    assert done.code == 0, done.err
    assert set(done.imported) <= NETWORKS
    assert re.search(r"2 images, ddpm, 2 steps, [\d.]+ s", done.out)


def test_a_run_is_evaluated(trained, tmp_path):
    done = Done(tmp_path, "evaluate", trained, "--n=8", "--steps=2", "--extractor=pixels", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["card"]["reference"]["name"] == "digits"


def test_names_for_completion_are_those_of_the_registries():
    from scalelong.diffusion import SAMPLERS
    from scalelong.evaluation.extractors import EXTRACTORS
    from scalelong.process import INTERPOLANTS
    from scalelong.runs.generate import autocast_type

    assert set(_names.SAMPLERS) == set(SAMPLERS)
    assert set(_names.EXTRACTORS) == set(EXTRACTORS)
    assert set(_names.PROCESSES) == set(INTERPOLANTS)
    for precision in _names.PRECISIONS:
        autocast_type(precision)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("scalelong train cifar10-t", ["cifar10-tiny", "cifar10-tiny-unet"]),
        ("scalelong train --scaling cs-r", ["cs-reverse"]),
        ("scalelong compare --scalings none,cs:0.5,un", ["none,cs:0.5,uniform"]),
        ("scalelong sample ru", ["run/"]),
        ("scalelong sample run --sampler ddi", ["ddim"]),
        ("scalelong train --set train.log", ["train.log_every="]),
        ("scalelong data info cif", ["cifar10"]),
        ("scalelong robust", ["robustness"]),
    ],
)
def test_the_shell_completes(line, expected, tmp_path):
    (tmp_path / "run").mkdir()
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_SCALELONG_COMPLETE": "complete_bash"}
    done = Done(tmp_path, environment=words)
    assert done.out.split() == expected
    assert done.imported == []


# ------------------------------------------------------------------------------------------------- terminals


def in_terminal(columns, arguments, folder):
    """Run a command in a pseudo-terminal of this width and return everything that it wrote."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "scalelong", *map(str, arguments)], stdin=side, stdout=side, stderr=side, cwd=folder,
        env={**environment, "TERM": "xterm-256color"}, start_new_session=True,
    )  # fmt: skip
    os.close(side)
    written, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        if select.select([main], [], [], 1)[0]:
            try:
                part = os.read(main, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            written += part
    os.close(main)
    assert process.wait(timeout=60) == 0, written.decode(errors="replace")
    text = re.sub(r"\x1b\[[0-9;]*m", "", written.decode(errors="replace"))  # colours
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", text).splitlines()


WIDTHS = [60, pytest.param(120, marks=pytest.mark.slow)]


@pytest.mark.parametrize("columns", WIDTHS)
def test_training_shows_step_and_time_left_at_any_width(columns, tmp_path):
    name = "a-run-with-a-rather-long-name-as-people-give-them"
    lines = in_terminal(columns, ["train", "digits-uvit-class", *TINY_OPTIONS, "--steps=12", "--out", name], tmp_path)
    progress = [line for line in lines if "/12 " in line]
    assert re.search(r"12/12 +0:00 left  loss \d+\.\d+", progress[-1])
    assert all(len(line) <= columns for line in progress)


@pytest.mark.parametrize("columns", WIDTHS)
def test_sampling_shows_step_and_time_left_at_any_width(columns, trained, tmp_path):
    lines = in_terminal(columns, ["sample", trained, "--n=4", "--steps=40", "--out=x.png"], tmp_path)
    progress = [line for line in lines if "/40 " in line]
    assert any(re.search(r"\d+/40 +\d:\d\d left", line) for line in progress)
    assert all(len(line) <= columns for line in progress)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 120])
def test_comparing_shows_step_and_time_left_at_any_width(columns, tmp_path):
    words = ["compare", "digits-uvit-class", "--scalings=none,cs:0.5", "--seeds=1", "--steps=200", "--distance=none"]
    lines = in_terminal(columns, [*words, *TINY_OPTIONS, "--no-report", "--out=c"], tmp_path)
    progress = [line for line in lines if "/200 " in line]
    assert any(re.search(r"cs-0.5-seed0.* \d+/200 +\d:\d\d left  loss", line) for line in progress)
    assert all(len(line) <= columns for line in progress)


@pytest.mark.parametrize("columns", [60, 120])
def test_tables_and_help_fit_the_terminal(columns, tmp_path, monkeypatch, capsys):
    from scalelong.cli.app import app

    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(columns))
    group = typer.main.get_command(app)
    lines = [[name, "--help"] for name in group.commands] + [["data", name, "--help"] for name in ("list", "prepare")]
    for words in (["--help"], *lines, ["presets"], ["data", "list"], ["paper", "list"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        too_long = [line for line in capsys.readouterr().out.splitlines() if len(line) > columns]
        assert not too_long, words
