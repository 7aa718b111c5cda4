"""stability.jsonl is bounded, plain JSON, and continued without repeating a step."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import batch, monitored_run, small_uvit, train

from scalelong import StabilityMonitor
from scalelong.errors import RunError
from scalelong.monitor.log import LogWriter, read_stability, rounded, thinned


def steps_in(path):
    return [entry["step"] for entry in read_stability(path).entries]


HEADER = {"step": 0, "format": 1, "network": "N", "skips": [], "blocks": [], "times": [0, 1]}


def test_a_long_log_is_bounded_even_over_the_whole_run_and_complete_at_its_end(tmp_path):
    journal = LogWriter(tmp_path / "s.jsonl", keep=40, recent=12)
    journal.begin({**HEADER, "every": 10}, 10)
    for step in range(10, 20_001, 10):
        journal.write({"step": step, **({"jump": {}} if step % 20 == 0 else {})})
    log = read_stability(tmp_path / "s.jsonl")
    steps = [entry["step"] for entry in log.entries]
    assert len(steps) <= 40
    assert steps == sorted(set(steps))
    assert steps[-12:] == list(range(steps[-12], 20_001, 10))
    even = log.evenly_spaced()
    gaps = {b["step"] - a["step"] for a, b in zip(even, even[1:], strict=False)}
    assert gaps == {even[0]["step"]} == {log.header["spacing"]}
    assert len(even) >= 10
    assert all("jump" in entry for entry in even)


@settings(max_examples=50, deadline=None)
@given(st.integers(8, 60), st.integers(0, 60), st.integers(1, 7))
def test_entries_with_alarms_are_dropped_last(keep, alarms, every):
    alarm = {"alarms": [{"text": "!"}]}
    entries = [{"step": k, **(alarm if k % every == 0 and k < alarms else {})} for k in range(keep)]
    recent = keep // 4
    spacing, left = thinned(entries, keep, recent, 2)
    assert len(left) <= 7 * keep / 8
    assert left[-recent:] == entries[-recent:]
    assert [e for e in left[:-recent] if "alarms" not in e] == [
        e for e in entries[:-recent] if e["step"] % spacing == 0 and "alarms" not in e
    ]
    raised = [e for e in entries if "alarms" in e]
    if len(raised) <= keep // 8:
        assert all(e in left for e in raised)


def test_a_resumed_log_keeps_its_spacing(tmp_path):
    header = {**HEADER, "every": 1}
    for first, last in ((1, 500), (401, 1000)):
        journal = LogWriter(tmp_path / "s.jsonl", keep=40)
        journal.begin(header, first)
        for step in range(first, last + 1):
            journal.write({"step": step})
    log = read_stability(tmp_path / "s.jsonl")
    even = [entry["step"] for entry in log.evenly_spaced()]
    assert even == list(range(log.header["spacing"], 1001, log.header["spacing"]))


def test_a_line_is_json_with_five_digits_and_no_nan(tmp_path):
    monitored_run(small_uvit(), 8, out=tmp_path / "s.jsonl")
    lines = (tmp_path / "s.jsonl").read_text().splitlines()

    def forbid(value):
        raise AssertionError(value)

    entries = [json.loads(line, parse_constant=forbid) for line in lines]
    assert entries[0]["format"] == 1
    for value in entries[-1]["probe"]["backbone"]:
        assert len(f"{value:.10g}".replace(".", "").replace("-", "").lstrip("0")) <= 5
    assert max(map(len, lines)) < 4000


@given(st.floats(-1e300, 1e300) | st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_numbers_keep_five_digits(value):
    kept = rounded(value)
    if kept is None:
        assert value != value or value in (float("inf"), -float("inf"))
    else:
        assert kept == pytest.approx(value, rel=5.1e-5)


def test_the_number_of_digits_depends_on_the_key():
    entry = {"step": 3, "grad": {"total": 1.234567, "blocks": [float("nan"), float("inf")]},
             "jump": [1.23456789012], "oscillation": {"jumps": 2, "probe": [0.123456]}}  # fmt: skip
    assert rounded(entry) == {"step": 3, "grad": {"total": 1.2346, "blocks": [None, None]},
                              "jump": [1.23456789], "oscillation": {"jumps": 2, "probe": [0.123]}}  # fmt: skip


# ----------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("stop", [4, 6, 12])
def test_a_resumed_loop_writes_the_log_of_the_uninterrupted_loop(tmp_path, stop):
    whole = small_uvit()
    train(whole, 16, StabilityMonitor(whole, batch(0)[:2], every=2, window=6, out=tmp_path / "whole.jsonl"))
    net = small_uvit()
    for start, steps in ((1, stop), (stop + 1, 16 - stop)):
        monitor = StabilityMonitor(net, batch(0)[:2], every=2, window=6, out=tmp_path / "parts.jsonl")
        train(net, steps, monitor, start=start)
    expected, parts = (read_stability(tmp_path / f"{name}.jsonl").entries for name in ("whole", "parts"))
    assert parts == expected


def test_restarting_at_an_earlier_step_drops_later_entries(tmp_path):
    path = tmp_path / "s.jsonl"
    net = small_uvit()
    train(net, 12, StabilityMonitor(net, batch(0)[:2], every=2, out=path))
    train(net, 4, StabilityMonitor(net, batch(0)[:2], every=2, out=path), start=7)
    assert steps_in(path) == [2, 4, 6, 8, 10]
    train(net, 2, StabilityMonitor(net, batch(0)[:2], every=2, out=path))
    assert steps_in(path) == [2]


def test_a_partly_written_last_line_is_dropped(tmp_path):
    path = tmp_path / "s.jsonl"
    net = small_uvit()
    train(net, 4, StabilityMonitor(net, batch(0)[:2], every=2, out=path))
    with open(path, "a") as file:
        file.write('{"step": 6, "pro')
    assert steps_in(path) == [2, 4]
    train(net, 2, StabilityMonitor(net, batch(0)[:2], every=2, out=path), start=7)
    assert steps_in(path) == [2, 4, 8]


def test_the_log_of_another_network_raises_and_is_kept(tmp_path):
    path = tmp_path / "s.jsonl"
    net, other = small_uvit(), small_uvit(depth=4)
    train(net, 2, StabilityMonitor(net, batch(0)[:2], every=2, out=path))
    before = path.read_text()
    with pytest.raises(RunError, match="skips"):
        train(other, 2, StabilityMonitor(other, batch(0)[:2], every=2, out=path))
    assert path.read_text() == before


def test_another_kind_of_file_raises_and_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n')
    net = small_uvit()
    with pytest.raises(RunError, match="metrics.jsonl"):
        train(net, 1, StabilityMonitor(net, batch(0)[:2], every=1, out=path))
    with pytest.raises(RunError, match="header"):
        read_stability(path)
    with pytest.raises(RunError, match="absent.jsonl"):
        read_stability(tmp_path / "absent.jsonl")


def test_a_log_can_be_continued_with_another_interval(tmp_path):
    path = tmp_path / "s.jsonl"
    net = small_uvit()
    train(net, 4, StabilityMonitor(net, batch(0)[:2], every=2, out=path))
    train(net, 4, StabilityMonitor(net, batch(0)[:2], every=4, out=path), start=5)
    log = read_stability(path)
    assert [e["step"] for e in log.entries] == [2, 4, 8]
    assert log.header["every"] == 4
