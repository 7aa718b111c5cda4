"""Logs by columns: the same figures as line by line, whatever the file holds."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelong.runs.logs import Tail, last_lines, read_columns, read_stability_arrays

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(["step", "loss", "lr", "note"]), JSON, max_size=4), max_size=20)


def plain(rows, name):
    """The definition: a number with a step that is a finite number."""
    number = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)
    keep = [r for r in rows if number(r.get("step")) and math.isfinite(r["step"]) and number(r.get(name))]
    return [r["step"] for r in keep], [r[name] for r in keep]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_columns_are_what_a_plain_reader_finds(rows, tmp_path_factory):
    rows = [{k: v for k, v in r.items() if not (isinstance(v, int) and abs(v) > 2**53)} for r in rows]
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = read_columns(path)
    for name in ("loss", "lr", "note"):
        steps, values = plain(rows, name)
        if steps:
            np.testing.assert_array_equal(columns[name].steps, np.asarray(steps, float))
            np.testing.assert_array_equal(columns[name].values, np.asarray(values, float))
        else:
            assert name not in columns


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_break_a_reader(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(b'{"step": 1, "loss": 0.5}\n' + content)
        assert read_columns(path)["loss"].values[0] == 0.5
        read_stability_arrays(path)
        last_lines(path)


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    loss = read_columns(path)["loss"]
    assert list(loss.steps) == [1, 2]
    assert loss.last == 1.0  # NaN is kept in the curve but is nobody's final value


def test_an_absent_file_is_empty(tmp_path):
    assert read_columns(tmp_path / "no.jsonl") == {}
    assert read_stability_arrays(tmp_path / "no.jsonl") is None
    assert Tail(tmp_path / "no.jsonl").read() == {}


def test_a_tail_reads_what_is_new_and_notices_a_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1, "loss": 1.0, "val_loss": 2.0}\n{"step": 2, "lo')
    assert tail.read() == {"step": 1, "loss": 1.0, "val_loss": 2.0}
    with open(path, "a") as file:
        file.write('ss": 0.5}\n')
    assert tail.read() == {"step": 2, "loss": 0.5, "val_loss": 2.0}
    path.write_text('{"step": 1, "loss": 1.0}\n')  # a resume took back a step
    assert tail.read()["step"] == 1


def test_last_lines_are_clean_and_few(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes(b"first\n" * 50 + b"\x1b[31mred\x1b[0m\n\n" + b"x" * 1000 + b"\n")
    lines = last_lines(path, 2)
    assert len(lines) == 2
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 300


@pytest.mark.slow
def test_a_million_lines_are_read_in_seconds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(1, 1_000_001):
            file.write(f'{{"step": {step}, "loss": 0.5, "lr": 0.001, "grad_norm": 1.25, "images": {64 * step}}}\n')
    before = time.process_time()
    columns = read_columns(path)
    assert len(columns["loss"]) == 1_000_000
    assert time.process_time() - before < 15  # CPU time; about 3 s measured
