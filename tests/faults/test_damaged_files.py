"""Every file of a run folder damaged in every way: the run goes on exactly, or says why not."""

import json
import random
import shutil
from contextlib import suppress

import pytest
from fault_runs import DAMAGES, as_arguments, check_error, command_line, damage, losses, small_config, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelong import LearnableScaling
from scalelong.errors import ScaleLongError
from scalelong.runs.logs import JsonLines
from scalelong.runs.run import Run, load_run
from scalelong.training import checkpoint
from scalelong.training.loop import train
from tiny_runs import read_lines

STEPS, MORE = 4, 6


def config(steps):
    return small_config(train__steps=steps, monitor__every=1, scaling=LearnableScaling())


def command(folder, steps=MORE):
    return [*as_arguments(train__steps=steps, monitor__every=1), "--scaling=ls", f"--out={folder}", "-q"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 4 steps, and the same one after 6."""
    base = tmp_path_factory.mktemp("damage")
    train(config(STEPS), base / "part", quiet=True)
    shutil.copytree(base / "part", base / "whole")
    train(config(MORE), base / "whole", quiet=True)
    return base / "part", base / "whole"


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def try_one(capsys, runs, folder, name, kind, rng):
    """Damage one file, then train on, open and report. Returns what became of training."""
    part, whole = runs
    shutil.copytree(part, folder)
    damage(folder / name, kind, rng)
    code, err = command_line(capsys, *command(folder))
    if code == 0:
        if name == "metrics.jsonl":  # what was damaged there is gone, the rest is as it was
            known = {step: entry for step, *entry in losses(whole)}
            unlike = [step for step, *entry in losses(folder) if entry != known.get(step)]
            assert len(unlike) <= 1, (kind, unlike)
            assert [step for step, *_ in losses(folder)][-2:] == [5, 6]
        else:
            assert losses(folder) == losses(whole)
        assert weights(folder, MORE) == weights(whole, MORE)
    else:
        check_error(code, err)
    for command_name in (("sample", folder, "--n=1", "--steps=1", "--device=cpu"), ("report", folder)):
        code_then, err_then = command_line(capsys, *command_name)
        if code_then:
            check_error(code_then, err_then)
    shutil.rmtree(folder)
    return "resumed exactly" if code == 0 else "refused with an error"


def must_go_on(name, kind):
    """Whatever there is a second copy of, or can be made again, must not stop a run."""
    return name.startswith(("checkpoints/step-00000004", "model/")) or (name == ".lock" and "folder" not in kind)


def go_through(capsys, runs, tmp_path, cases, rng, note=None):
    counts = {}
    for name, kind in cases:
        outcome = try_one(capsys, runs, tmp_path / "run", name, kind, rng)
        if must_go_on(name, kind):
            assert outcome == "resumed exactly", (name, kind)
        counts.setdefault(name.split("/")[0], []).append(outcome)
    for where, outcomes in counts.items() if note else ():
        happened = "; ".join(f"{outcome}: {outcomes.count(outcome)}" for outcome in sorted(set(outcomes)))
        lost = "the damaged lines themselves" if where == "metrics.jsonl" else "nothing"
        note("a file of the run is damaged", where, len(outcomes), happened, lost)


def test_some_damage_to_many_files(capsys, runs, tmp_path):
    rng = random.Random(3)
    names = files_of(runs[0])
    go_through(capsys, runs, tmp_path, [(name, DAMAGES[k % 6]) for k, name in enumerate(names)][::5], rng)


@pytest.mark.slow
def test_every_damage_to_every_file(capsys, runs, tmp_path, note):
    cases = [(name, kind) for name in files_of(runs[0]) for kind in DAMAGES]
    go_through(capsys, runs, tmp_path, cases, random.Random(4), note)


# ---------------------------------------------------------------------------------- checkpoints by fuzzing


@pytest.mark.slow
def test_any_bit_of_a_checkpoint_shows(runs, tmp_path, note):
    """A flipped bit in any file of the newest checkpoint: the one before is taken, never a wrong one."""
    rng, folder = random.Random(5), tmp_path / "run"
    shutil.copytree(runs[0], folder)
    names = files_of(folder / "checkpoints" / f"step-{STEPS:08d}")
    tried = 0
    for _ in range(150):
        for name in names:
            path = folder / "checkpoints" / f"step-{STEPS:08d}" / name
            whole = path.read_bytes()
            damage(path, "one bit flipped", rng)
            state, notes = checkpoint.newest(folder / "checkpoints")
            if name == "manifest.json" and state.progress.step == STEPS:  # the flip made no difference to JSON
                assert json.loads(path.read_text()) == json.loads(whole)
            else:
                assert state.progress.step == STEPS - 1
                assert "damaged" in notes[0]
            path.write_bytes(whole)
            tried += 1
    note(
        "a file of the run is damaged",
        "one bit of a checkpoint",
        tried,
        "the previous checkpoint was used, with a message",
    )


def test_a_manifest_that_names_another_step_is_not_believed(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
    state, notes = checkpoint.newest(path.parent.parent)
    assert state.progress.step == 3
    assert "manifest.json" in notes[0]


def test_without_any_intact_checkpoint_a_run_does_not_start_over(capsys, runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    for path in (folder / "checkpoints").glob("step-*/model.safetensors"):
        path.write_bytes(b"")
    before = (folder / "metrics.jsonl").read_bytes()
    code, err = command_line(capsys, *command(folder))
    check_error(code, err, "no intact checkpoint", "step-00000004", "step-00000003")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_damaged_newest_checkpoint_does_not_push_out_good_ones(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs[0], folder)
    (folder / "checkpoints" / "step-00000004").rename(folder / "checkpoints" / "step-00000099")
    state, _ = checkpoint.newest(folder / "checkpoints")
    assert state.progress.step == 3
    checkpoint.save(folder / "checkpoints", state, keep=1)
    assert checkpoint.newest(folder / "checkpoints")[0].progress.step == 3


# ------------------------------------------------------------------------------------------ logs by fuzzing

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "loss", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
LINE = st.one_of(
    st.integers(1, 9).map(lambda step: json.dumps({"step": step, "loss": 0.5}).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=20).filter(lambda raw: b"\n" not in raw),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINE, max_size=8), torn=st.booleans(), step=st.integers(0, 9))
def test_any_log_is_cut_at_a_step_and_read(tmp_path, lines, torn, step):
    path = tmp_path / "metrics.jsonl"
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(content[:-1] if torn else content)
    JsonLines(path).keep_until(step)
    kept = path.read_bytes()
    assert content.startswith(kept)
    assert kept == b"" or kept.endswith(b"\n")
    if kept:
        last = json.loads(kept.splitlines()[-1]) if b"\r" not in kept and b"\x0b" not in kept else {}
        assert last.get("step", 0) <= step
    log = JsonLines(path)
    log.write({"step": step + 1})
    log.close()
    assert read_lines(path)[-1] == {"step": step + 1}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(st.sampled_from(["config", "data", "shapes", "class_names", "x"]), VALUES, max_size=5))
def test_any_config_json_is_a_run_or_an_error(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps(value))
    for read in (lambda: Run(tmp_path).settings, lambda: Run(tmp_path).config, lambda: load_run(tmp_path)):
        with suppress(ScaleLongError):
            read()
