"""Check README.md, CONTRIBUTING.md and the pages of docs/: `make docs`, which then builds the site strictly.

Links and anchors lead somewhere, commands exist, Python examples parse, tables have rows, no placeholder is left,
every page is in the navigation, and every public name is documented (docs/docstrings.py).
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import docstrings

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.M | re.S)


def prose(text: str) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), flags=re.M)
    plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings]
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists():
            yield f"broken link {target}"
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            yield f"no heading for {target}"


def unknown_commands(_: Path, text: str) -> Iterator[str]:
    from scalelong.cli.app import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    fenced = "\n".join(code for _, code in FENCE.findall(text))
    used = set(re.findall(r"^(?:.*-m )?scalelong ([a-z][a-z-]*)", fenced, flags=re.M))
    used |= set(re.findall(r"`scalelong ([a-z][a-z-]*)", prose(text)))
    yield from (f"there is no command `scalelong {name}`" for name in sorted(used - known))


def unparsable_examples(_: Path, text: str) -> Iterator[str]:
    for language, code in FENCE.findall(text):
        if language == "python":
            try:
                ast.parse(textwrap.dedent(code))
            except SyntaxError as error:
                yield f"Python example does not parse: {error.msg}: {(error.text or '').strip()}"


def empty_tables(_: Path, text: str) -> Iterator[str]:
    lines = [*prose(text).splitlines(), ""]
    for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
        if re.fullmatch(r"\|[-:| ]+\|", line) and not below.startswith("|"):
            yield f"table without rows: {above}"


def placeholders(_: Path, text: str) -> Iterator[str]:
    without_code = re.sub(r"`[^`]*`", "", prose(text))
    yield from (f"placeholder {name}" for name in re.findall(r"\b[A-Z]{2,}_[A-Z_]+\b|\bTODO\b|\bTBD\b", without_code))


def missing_from_navigation(page: Path, _: str) -> Iterator[str]:
    if page.is_relative_to(ROOT / "docs"):
        listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M)
        if page.relative_to(ROOT / "docs").as_posix() not in listed:
            yield "not in the navigation: add it to `nav` in mkdocs.yml"


CHECKS = (broken_links, unknown_commands, unparsable_examples, empty_tables, placeholders, missing_from_navigation)


def main() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    problems = [
        f"{page.relative_to(ROOT)}: {problem}"
        for page in pages
        for check in CHECKS
        for problem in check(page, page.read_text(encoding="utf-8"))
    ] + list(docstrings.problems())
    print("\n".join(problems) or f"{len(pages)} pages, no problem found")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
