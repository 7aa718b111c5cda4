"""Every command in README.md, CONTRIBUTING.md, docs/*.md and the --help texts works as shown.

The real command line parses each `scalelong` line, so a wrong option fails. Each line then runs in a fresh process in a
small form: SMALL appends options per command, and CIFAR-10 becomes the embedded digits. A line that cannot run here
has its reason in PARSED_ONLY. A line of a command that is in neither fails: add it to one of them.

The first line of every command is in the fast suite, the others are slow. `compare` is slow too: it starts a process
per run, and tests/experiments has it in the fast suite.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from rich.emoji import Emoji

from scalelong.cli.app import app
from tiny_runs import TINY

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("scalelong", "accelerate", "torchrun", "make", "pip", "python")

SETTINGS = " ".join(f"--set {key}={value}" for key, value in TINY.items() if key[:6] not in ("model.", "train."))
SMALL = {
    "train": f"--steps 2 --batch-size 8 --quiet --set evaluate.n=72 --set evaluate.extractor=pixels {SETTINGS}",
    "sample": "--n 4 --steps 2",
    "compare": f"--scalings none,cs --seeds 1 --steps 4 --samples 72 --jobs 1 --quiet {SETTINGS}",
    "report": "",
    "export": "",
    "evaluate": "--n 72 --extractor pixels --batch-size 72",
    "presets": "",
    "doctor": "",
    "kappa": "--samples 500",
    "theory": "--seeds 2 --width 32 --skips 2 --depth 1",
    "frontier": "--skips 4 --steps 10 --seeds 1 --jobs 1",
    "coords": "--widths 16,32 --seeds 2 --steps 2 --parametrizations standard --jobs 1 --set train.batch_size=4",
    "transfer": "--widths 16 --lrs 1e-3 --steps 2 --seeds 1 --jobs 1 --set train.batch_size=4 --set validate.n=4",
    "robustness": "--images 4 --samples 0 --points 1 --bins 1 --variance 0.1",
    "probe": "--n 60 --n-test 40 --t 0.1 --layers mid_block --no-cache",
    "paper list": "",
    "paper page": "",
    "data list": "",
    "data prepare": "",
    "data info": "",
    "data stats": "--n 72 --extractor pixels",
}
PARSED_ONLY = {
    r"train .*uvit": "needs GPUs and data that must be downloaded",
    r"sample .*--prompt": "needs a run with text conditions",
    r"paper (figure|table)-\d+": "trains for minutes or counts the FLOP of the paper's networks, tested in tests/paper",
    r"paper all": "trains for an hour",
    r"data encode": "needs COCO and published weights, tested in tests/data/test_true_formats.py",
    r"evaluate .*--metrics .*fid": "computes features of Inception, DINOv2 or CLIP, tested in tests/evaluation",
    r"evaluate .*--step best": "needs a run that kept its best network, tested in tests/runs/test_evaluate_run.py",
    r"tune-skips": "tested in tests/experiments/test_skip_search.py",
    r"tune": "trains many runs, tested in tests/experiments/test_tuning.py",
    r"freeze": "needs a run of LS, tested in tests/experiments/test_freezing.py",
    r"campaign": "trains for hours, tested in tests/experiments/test_campaign.py",
}
INSTEAD = {
    "cifar10": "digits", "cifar10-tiny": "digits", "cifar10:train": "digits:train", "cifar10:test": "digits:validation",
    "cifar10:train:10000": "digits:train:80",
}  # fmt: skip


def lines_of(page):
    """Yield the command lines in a page's code blocks, without comments."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        if language in ("", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").split()
                if words and words[0] in PROGRAMS:
                    yield line.removeprefix("$ ")


def scalelong_words(line):
    """Return the words after `scalelong`, also under a launcher; None for another program."""
    words = shlex.split(line, comments=True)
    if "scalelong" not in words or words[0] in ("pip", "make"):
        return None
    return words[words.index("scalelong") + 1 :]


def command_of(words):
    """Return `train`, `data list`, `paper list`, …"""
    return " ".join(words[: 2 if words[0] in ("data", "paper") else 1])


def reason_not_to_run(words):
    return next((why for pattern, why in PARSED_ONLY.items() if re.match(pattern, " ".join(words))), None)


def parse(words):
    """Parse with the real command line; a wrong command, option or number of arguments raises."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, list(words))


DOCUMENTED = [(page, line) for page in PAGES for line in lines_of(page)]
SHOWN = list(dict.fromkeys((page.name, line, tuple(w)) for page, line in DOCUMENTED if (w := scalelong_words(line))))


def cases():
    seen, forms = set(), set()
    for page, _, words in SHOWN:
        if reason_not_to_run(words) is None and words not in forms:
            forms.add(words)
            first = command_of(words) not in seen
            seen.add(command_of(words))
            marks = () if first and words[0] != "compare" else (pytest.mark.slow,)
            yield pytest.param(words, id=f"{page}: scalelong {' '.join(words)}", marks=marks)


def test_pages_show_commands():
    assert len(SHOWN) > 30
    assert {command_of(words) for _, _, words in SHOWN} >= {"train", "sample", "evaluate", "compare", "report", "kappa"}


@pytest.mark.parametrize(("page", "line", "words"), SHOWN, ids=lambda value: value if isinstance(value, str) else "")
def test_every_documented_line_parses_and_has_a_rule(page, line, words):
    parse(words)
    assert command_of(words) in SMALL or reason_not_to_run(words), "add the command to SMALL or to PARSED_ONLY"


def test_every_other_program_line_names_what_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for page, line in DOCUMENTED:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.M), f"{page.name}: {line}"
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), f"{page.name}: {line}"
        elif words[0] == "pip":
            for extra in re.findall(r"scalelong\[([\w,]+)\]", line):
                assert all(re.search(rf"^{name} = \[", project, flags=re.M) for name in extra.split(",")), line


def commands(group=None, path=()):
    """Yield (path, command) of every command, subcommands included."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), list(commands()), ids=lambda value: "" if not value else str(value))
def test_every_help_text_has_an_example_that_parses(path, command):
    examples = re.findall(r"^\s*(?:Example: )?((?:accelerate .*-m )?scalelong .*)$", command.help, flags=re.M)
    assert examples, f"{' '.join(path)} has no example in its help"
    for line in "\n".join(examples).replace(";", "\n").splitlines():
        words = scalelong_words(line)
        assert tuple(words[: len(path)]) == path
        parse(words)


@pytest.mark.parametrize(("path", "command"), list(commands()), ids=lambda value: "" if not value else str(value))
def test_no_help_text_has_a_code_that_rich_prints_as_an_emoji(path, command):
    texts = [command.help, *(getattr(param, "help", None) or "" for param in command.params)]
    assert [text for text in texts if Emoji.replace(text) != text] == []


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder where the documented paths exist: runs (copies of a tiny one) and folders of images."""
    from scalelong.runs import Request, load_run
    from scalelong.runs.config import override
    from scalelong.runs.settings import to_yaml
    from scalelong.training import preset, train
    from scalelong.training.presets import choose
    from scalelong.training.speed import cpu_name

    home = tmp_path_factory.mktemp("world")
    run, flow = home / "RUN", home / "FLOW"
    for folder, name, objective in ((run, "digits-uvit-class", "eps"), (flow, "digits-uvit", "flow")):
        config = override(choose(name, objective=objective), {**TINY, "train.steps": 2, "monitor.every": 1})
        train(config, folder, quiet=True)
    load_run(run).evaluate(Request(n=72, steps=2, batch_size=72), "digits:train:80", "pixels", save_as="evaluate")
    for _, _, words in SHOWN:
        inputs = [word for k, word in enumerate(words) if word.startswith("runs/") and words[k - 1] != "--out"]
        for word in inputs:
            if not (home / word).exists() and "*" not in word:
                shutil.copytree(flow if "-flow-" in word else run, home / word)
    # A measurement of this machine, so that `doctor` does not time every preset.
    speed = {"machine": cpu_name(), "threads": 1, "torch": metadata.version("torch"), "device": "cpu"}
    speed |= {"measured": "now", "seconds": {"digits": 0.1}, "flops": {"uvit": 5e10}}
    (home / "cache").mkdir()
    (home / "cache" / "speed.json").write_text(json.dumps(speed))
    pixels = np.random.default_rng(0).integers(0, 256, (72, 8, 8), dtype=np.uint8)
    for folder in ("samples", "other_folder", "photos"):
        (home / folder).mkdir()
        for k, image in enumerate(pixels):
            Image.fromarray(image).save(home / folder / f"{k}.png")
    (home / "my.yaml").write_text(to_yaml(preset("digits")), encoding="utf-8")
    return home


def small_form(words, home):
    """Return the line with a small dataset, its globs expanded, and the options that keep it short."""
    shown = [INSTEAD.get(word, word) for word in words]
    expanded = [match for word in shown for match in (sorted(home.glob(word)) if "*" in word else [word])]
    extra = [] if "--compare" in words else shlex.split(SMALL[command_of(words)])
    if "--data" in words and words[0] in ("train", "compare") and words[1].startswith("--"):  # a U-Net is picked
        extra = [word for k, word in enumerate(extra) if "model." not in "".join(extra[k : k + 2])]
        extra += ["--set", "model.channels=8,8,8"]
    if words[0] == "evaluate" and not {"--images", "--compare"} & set(words):
        extra += ["--reference", "digits:train:80", "--steps", "2"]
    if words[0] == "train" and "--out" not in words:
        extra += ["--out", f"trained-{'-'.join(words)}".replace("/", "-")]
    return [*map(str, expanded), *extra]


@pytest.mark.parametrize("words", list(cases()))
def test_documented_command_runs_in_a_fresh_process(words, world):
    environment = {**os.environ, "SCALELONG_CACHE": str(world / "cache"), "PYTHONWARNINGS": "ignore"}
    options = {"cwd": world, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    run = lambda *line: subprocess.run([sys.executable, "-m", "scalelong", *line], **options)
    if words[:2] == ("data", "info"):
        assert run("data", "prepare", "digits").returncode == 0
    line = small_form(words, world)
    result = run(*line)
    assert result.returncode == 0, f"scalelong {' '.join(line)}\n{result.stderr}"
    assert "Traceback" not in result.stderr
    if "--json" in words:
        json.loads(result.stdout)
    for option in ("--out", "--grid", "--figure"):
        if option in words:
            assert (world / words[words.index(option) + 1]).exists(), f"{option} was not written"
