"""Whatever is given as a config, a setting, a scaling, data or a prompt: it works, or one sentence says why not."""

import json
import os
import random
import resource
import shutil
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from fault_runs import (
    as_arguments,
    check_error,
    command_line,
    finish,
    small_config,
    warnings_as_before,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from scalelong.data import load
from scalelong.errors import ScaleLongError
from scalelong.runs.config import Config, known_keys, override, parse_settings
from scalelong.scaling import Scaling, parse_scaling
from scalelong.training.loop import train
from tiny_runs import tiny_settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**310) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = known_keys()
WORDS = (
    "",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1e9",
    "-0.5",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "none",
    "true",
    "x",
    "٣",
    "+-5",
    "1__0",
    "9" * 30,
    "9" * 5000,
    "1,2",
    "1,-2",
    "()",
    "../x",
    "\x00",
    "\ud800",
    "🙂",
    "1e-320",
    "1_0",
    " 4 ",
    "0x10",
)
patient = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def accepts(action):
    """Whether it works; anything but a sentence fails the test."""
    with suppress(ScaleLongError):
        action()
        return True
    return False


@patient
@given(
    values=st.dictionaries(
        st.sampled_from([*{k.split(".")[0] for k in KEYS}, "scaling", "preset", "?"]), JSON, max_size=4
    )
)
def test_any_json_is_a_config_or_an_error(values):
    accepts(lambda: Config.from_dict(values))


@patient
@given(key=st.sampled_from(KEYS), value=JSON | st.text(max_size=12) | st.sampled_from(WORDS))
def test_any_value_of_any_setting_is_taken_or_refused_by_name(key, value):
    said = ""
    try:
        config = override(small_config(), {key: value})
    except ScaleLongError as error:
        said = str(error)
    if said:
        assert key.split(".")[-1] in said or "not both" in said
    else:
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@patient
@given(
    pairs=st.lists(
        st.text(max_size=20) | st.tuples(st.text(max_size=12), st.text(max_size=6)).map("=".join), max_size=3
    )
)
def test_any_words_after_set_are_settings_or_an_error(pairs):
    accepts(lambda: override(small_config(), parse_settings(pairs)))


@patient
@given(
    kind=st.sampled_from(["none", "uniform", "cs", "explicit", "ls", "stable", "rezero", "?"]),
    rest=st.dictionaries(
        st.sampled_from(
            ["kappa", "value", "reverse", "coefficients", "calibration", "init", "gate", "reduction", "share", "?"]
        ),
        JSON,
        max_size=4,
    ),
)
def test_any_scaling_is_taken_or_refused(kind, rest):
    accepts(lambda: Scaling.from_dict({"kind": kind, **rest}))
    accepts(lambda: parse_scaling({"kind": kind, **rest}))


@patient
@given(value=JSON)
def test_anything_in_place_of_a_scaling_is_refused(value):
    accepts(lambda: parse_scaling(value))


def test_the_command_line_refuses_in_one_line(capsys, tmp_path):
    out = f"--out={tmp_path / 'run'}"
    for arguments in (
        ["train", "digitz"],
        ["train", "--set", "train.lrr=1"],
        ["train", "--set", "train.steps=+-5", out],
        ["train", "--set", "x"],
        ["train", "--set", "=1"],
        ["train", "--scaling", "cz"],
        ["train", "--kappa", "nan", out],
        ["train", "--kappa", "-1", out],
        ["train", "--data", "no-such-data", out],
        ["train", "--data", str(tmp_path), out],
        ["train", "--set", f"seed={2**70}", "--set", "train.steps=1", "--set", "sample.n=0", out],
        ["sample", tmp_path],
        ["report", tmp_path / "no"],
        ["compare", "digitz", f"--out={tmp_path / 'c'}"],
    ):
        code, err = command_line(capsys, *arguments)
        check_error(code, err)


# ---------------------------------------------------------------------------- settings that pass, trained with


def bounded():
    """No more than 6 GB, so that a size out of a fuzzer's hat does not take the machine down."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, resource.RLIM_INFINITY))


def try_setting(key, value, folder, log):
    """Train one step with the setting, in a process of its own: it ends in time, with 0 or a sentence."""

    def action():
        from scalelong.cli import main

        bounded()
        chosen = {**tiny_settings(train__steps=1, sample__steps=2), key: value}
        with warnings_as_before():
            main(
                ["train", "digits", f"--out={folder}", "-q", *(f"--set={name}={word}" for name, word in chosen.items())]
            )

    code = finish(action, log, timeout=120)
    if code != 0:
        check_error(code, log.read_text(errors="replace"))
    return code


def accepted_settings():
    for key in KEYS:
        for word in WORDS:
            # Steps and evaluations that pass may take hours, as they should.
            if key in ("train.steps", "evaluate.every") or "\x00" in word or "\ud800" in word:
                continue
            try:
                override(small_config(), {key: word})
            except ScaleLongError:
                continue
            yield key, word


def test_some_settings_that_pass_do_train_or_are_refused(tmp_path, imported):
    for k, (key, word) in enumerate(random.Random(0).sample(list(accepted_settings()), 1)):
        try_setting(key, word, tmp_path / str(k), tmp_path / "log")


@pytest.mark.slow
def test_many_settings_that_pass_do_train_or_are_refused(tmp_path, imported, note):
    chosen, codes, failed = random.Random(1).sample(list(accepted_settings()), 100), [], []
    for k, (key, word) in enumerate(chosen):
        try:
            codes.append(try_setting(key, word, tmp_path / str(k), tmp_path / "log"))
        except AssertionError as error:
            failed.append((key, word[:40], str(error)[:300]))
        shutil.rmtree(tmp_path / str(k), ignore_errors=True)
    assert not failed, failed
    happened = f"trained: {codes.count(0)}; refused with an error: {codes.count(1)}"
    note("malformed input", "unusual settings that pass validation, used for training", len(codes), happened)


# ------------------------------------------------------------------------------------------------------ data


def write_bomb(path, side):
    """A black picture that is small as a file and takes the memory of a machine when it is opened."""
    row = bytes(1 + side // 8)
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(row * 100) for _ in range(side // 100)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, content in ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b"")):
            check = struct.pack(">I", zlib.crc32(kind + content))
            file.write(struct.pack(">I", len(content)) + kind + content + check)


def write_pictures(folder):
    """Kinds of files that people have in their folders."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8))
    colour.save(folder / "good.png")
    colour.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(rng.integers(0, 65535, (12, 12), dtype=np.uint16)).save(folder / "sixteen.png")
    colour.save(folder / "moving.gif", save_all=True, append_images=[colour.rotate(90), colour.rotate(180)])
    write_bomb(folder / "huge.png", 30_000)
    colour.save(folder / "mislabelled.jpg", format="PNG")
    whole = (folder / "good.png").read_bytes()
    (folder / "broken.png").write_bytes(whole[: len(whole) // 2])
    (folder / "zero.png").write_bytes(b"")
    (folder / "text.png").write_text("not a picture")
    (folder / "pickle.png").write_bytes(b"\x80\x04\x95" + bytes(40))
    (folder / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(%pipe%touch owned) run\n")
    os.mkfifo(folder / "pipe.png")
    os.symlink("/dev/zero", folder / "zeros.png")
    os.symlink("round.png", folder / "round.png")
    os.symlink("nowhere", folder / "gone.png")
    (folder / "long.png").write_bytes(whole + bytes(1 << 20))
    return sorted(path.name for path in folder.iterdir())


def test_each_strange_picture_is_used_or_named(capsys, tmp_path, note):
    names, outcomes = write_pictures(tmp_path / "all"), {}
    for name in names:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        os.rename(tmp_path / "all" / name, folder / name)
        code, err = command_line(capsys, "data", "prepare", folder, "--image-size=8")
        if code:
            check_error(code, err, name)
        outcomes[name] = code
        os.rename(folder / name, tmp_path / "all" / name)
    used = {name for name, code in outcomes.items() if code == 0}
    assert used == {"good.png", "mislabelled.jpg", "long.png", "cmyk.jpg", "sixteen.png"}, outcomes
    code, err = command_line(capsys, "data", "prepare", tmp_path / "all", "--image-size=8", "--skip-bad")
    assert code == 0, err
    assert len(load(str(tmp_path / "all"), image_size=8, skip_bad=True)) == sum(code == 0 for code in outcomes.values())
    note(
        "malformed input",
        "broken, huge, animated, CMYK, 16-bit, zero-byte, mislabelled pictures, pipes, devices, links",
        2 * len(names),
        "used, or named in an error; with --skip-bad the rest is used",
    )


def test_captions_with_control_characters_are_named(capsys, tmp_path, note):
    tried = 0
    for k, text in enumerate(("a\x00b", "\x1b[31mred", "a\x07", "\u202eabc", "", "\ufeff", "a\tb", "\x85next")):
        folder = tmp_path / str(k)
        folder.mkdir()
        Image.new("RGB", (8, 8)).save(folder / "one.png")
        (folder / "one.txt").write_text(text, encoding="utf-8")
        code, err = command_line(capsys, "data", "prepare", folder)
        if code:
            check_error(code, err, "one.png")
        assert "\x1b" not in err
        tried += 1
    note("malformed input", "captions with control characters", tried, "kept, or named in an error; never printed raw")


def go_through_arrays(capsys, tmp_path, count, seed):
    """Train on a .npy file with damage anywhere in it. Returns how often that worked and how often it was refused."""
    rng, codes = random.Random(seed), []
    np.save(tmp_path / "good.npy", np.random.default_rng(0).integers(0, 255, (9, 8, 8), dtype=np.uint8))
    whole = (tmp_path / "good.npy").read_bytes()
    for k in range(count):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(min(len(raw), 140))] = rng.randrange(256)
        path, out = tmp_path / f"{k}.npy", tmp_path / f"run-{k}"
        path.write_bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)
        code, err = command_line(capsys, *as_arguments(train__steps=1), f"--data={path}", f"--out={out}", "-q")
        if code:
            check_error(code, err)
            assert not out.exists() or not any(out.glob("checkpoints/*"))
        codes.append(code)
    return codes


def test_a_damaged_array_is_data_or_an_error(capsys, tmp_path):
    go_through_arrays(capsys, tmp_path, 8, 1)


@pytest.mark.slow
def test_many_damaged_arrays_are_data_or_an_error(capsys, tmp_path, note):
    codes = go_through_arrays(capsys, tmp_path, 150, 2)
    note(
        "malformed input",
        "prepared-data files (.npy) with damage",
        len(codes),
        f"used: {codes.count(0)}; refused with an error: {codes.count(1)}",
    )


def test_a_failed_command_leaves_a_good_file_as_it_was(capsys, tmp_path):
    """`sample` and `report` write beside and rename: a failure on the way costs no earlier result."""
    folder = tmp_path / "run"
    train(small_config(train__steps=1), folder, quiet=True)
    (folder / "report.html").write_text("the earlier page")
    (folder / "grid.png").write_bytes(b"the earlier grid")
    shutil.move(folder / "config.json", tmp_path / "config.json")
    shutil.move(folder / "metrics.jsonl", tmp_path / "metrics.jsonl")
    for command in (["report", folder], ["sample", folder, f"--out={folder / 'grid.png'}"]):
        code, err = command_line(capsys, *command)
        check_error(code, err)
    assert (folder / "report.html").read_text() == "the earlier page"
    assert (folder / "grid.png").read_bytes() == b"the earlier grid"
    shutil.move(tmp_path / "config.json", folder / "config.json")
    for bad in (
        ["--sampler=x"],
        ["--steps=0"],
        ["--class=999"],
        ["--prompt=\x1b[0m"],
        ["--guidance=nan"],
        ["--n=0"],
        ["--precision=x"],
        ["--device=x"],
        ["--steps=-3"],
        ["--seed=-1"],
        ["--batch-size=0"],
        ["--first=-1"],
    ):
        code, err = command_line(capsys, "sample", folder, "--n=1", f"--out={folder / 'grid.png'}", *bad)
        check_error(code, err)
        assert (folder / "grid.png").read_bytes() == b"the earlier grid"
