"""Runs of a network so small that a step takes milliseconds, processes that can be killed, and the command line."""

import hashlib
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

from scalelong.runs.run import Run
from tiny_runs import read_lines, tiny_config, tiny_settings

OFTEN = {"checkpoint__every": 1, "validate__n": 8}  # a checkpoint a step: something to lose at any moment


def small_config(name="digits-uvit", scaling=None, **settings):
    return tiny_config(name, scaling, **{**OFTEN, **settings})


def as_arguments(**settings):
    """The same run for the command line."""
    values = tiny_settings(**{**OFTEN, **settings})
    return ["train", "digits-uvit", *(f"--set={key}={value}" for key, value in values.items())]


def losses(folder):
    return [
        (entry["step"], entry["loss"], entry["grad_norm"])
        for entry in read_lines(Run(folder).metrics_path)
        if {"step", "loss", "grad_norm"} <= set(entry)  # a foreign line, planted there, has none of them
    ]


def weights(folder, step):
    """Hashes of everything that a checkpoint has learned."""
    found = Run(folder).checkpoints_path / f"step-{step:08d}"
    return {path.name: digest(path) for path in sorted(found.glob("*.safetensors"))}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.part"))


# ----------------------------------------------------------------------------- processes to be killed


def start(action, log=None):
    """Run `action` in a copy of this process, which has everything imported already; returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at every fork
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        action()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child, timeout=120.0):
    """The exit code, minus the signal that ended it. A process that hangs fails the test."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the process did not end within {timeout:g} s")


def finish(action, log=None, timeout=120.0):
    return wait(start(action, log), timeout)


# ------------------------------------------------------------------------------------ the command line


@contextmanager
def warnings_as_before():
    shown = warnings.showwarning
    try:
        yield
    finally:
        warnings.showwarning = shown


def command_line(capsys, *arguments):
    """(exit code, what it said on stderr) of the command, in this process."""
    from scalelong.cli import main

    capsys.readouterr()
    with warnings_as_before(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as leaving:
            code = 0 if leaving.code is None else leaving.code
    return code, capsys.readouterr().err


def check_error(code, err, *words):
    """Exit code 1 and one line for people."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1, (code, err)
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert "unexpected" not in lines[0], err
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


# ------------------------------------------------------------------------------------------ damage to files

DAMAGES = ("truncated", "one bit flipped", "empty", "foreign", "removed", "a folder in its place")


def damage(path, kind, rng):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "one bit flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        path.write_bytes(
            rng.choice([b"\x89PNG\r\n\x1a\n" + bytes(64), b"PK\x03\x04" + bytes(64), b'{"a": [1]}\n', b"[]"])
        )
    else:
        path.unlink()
        if kind == "a folder in its place":
            path.mkdir()


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def planted(value, path, other):
    """The value with `other` at a place."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = planted(value[path[0]], path[1:], other)
    return copy
