"""Blocks of lines parsed at once hold what each line holds by itself."""

import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scalelong import files
from scalelong.files import json_line_blocks as blocks
from scalelong.files import parse_json_line as parsed

OBJECTS = st.dictionaries(st.sampled_from(["step", "loss", "é"]), st.integers() | st.floats() | st.text(), max_size=3)
LINES = st.lists(
    OBJECTS.map(lambda entry: json.dumps(entry).encode())
    | st.sampled_from(
        [b"", b"{", b"1,2", b"[1", b"2]", b'"\xff"', b"\x00", b"null", b'{"step": 1', b"{}\r", b"[" * 3000]
    )
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, torn=st.booleans(), size=st.sampled_from([1, 16, 64, 1 << 18]))
@example(lines=[b"[1", b"{}", b"2]", b"1,2", b"1,2"], torn=False, size=1 << 18)
def test_blocks_of_any_size_hold_what_each_line_holds(tmp_path_factory, lines, torn, size):
    path = tmp_path_factory.getbasetemp() / "log.jsonl"
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(content[:-1] if torn else content)
    expected = [row for line in path.read_bytes().split(b"\n") if isinstance(row := parsed(line), dict)]
    before, files.BLOCK = files.BLOCK, size
    try:
        found = [row for rows in blocks(path) for row in rows]
    finally:
        files.BLOCK = before
    assert json.dumps(found) == json.dumps(expected)  # as text: NaN equals itself


def test_a_log_that_is_not_there_is_empty(tmp_path):
    assert list(blocks(tmp_path / "no.jsonl")) == []
    assert list(blocks(tmp_path)) == []
