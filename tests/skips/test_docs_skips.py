"""The page "Scale your own network" runs from top to bottom as one script, and prints what it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from scalelong.skips import finders

PAGE = Path(__file__).parents[2] / "docs" / "skips.md"


def blocks(page: Path = PAGE) -> list[tuple[int, str, str]]:
    """(line, language, code) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    return [(text[: match.start()].count("\n") + 1, match[1], match[2]) for match in fences]


def test_the_page_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finders, "_ADAPTERS", {})
    namespace: dict[str, object] = {"__name__": "page"}
    printed, ran, shown = "", 0, 0
    for line, language, code in blocks():
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
            printed, ran = out.getvalue(), ran + 1
        elif language == "text":
            assert printed == code, f"line {line}"
            shown += 1
    assert ran > 10
    assert shown > 0


@pytest.mark.parametrize("name", ["inference.md", "methods.md"])
def test_the_pages_about_methods_run(name):
    namespace: dict[str, object] = {"__name__": "page"}
    code = [code for _, language, code in blocks(PAGE.with_name(name)) if language == "python"]
    assert code
    for each in code:
        exec(each, namespace)


def test_the_network_of_ones_own_has_about_twenty_lines():
    code = next(code for _, language, code in blocks() if "class MyUNet" in code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 28


@pytest.mark.parametrize("limit", ["exchange", "block.forward", "both sides", "LoRA", "modules_to_save"])
def test_every_known_limit_is_told(limit):
    text = PAGE.read_text(encoding="utf-8")
    assert limit in text[text.index("## Limits") :]
