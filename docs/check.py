"""Check the documentation: every relative link and image leads somewhere, every command shown exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:", t) and not t.startswith("#")]
    return [f"{page.relative_to(ROOT)}: {t} does not exist" for t in local if not (page.parent / t).exists()]


def unknown_commands(page: Path) -> list[str]:
    from scalelong.cli.app import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    used = set(re.findall(r"(?:^|`|-m )scalelong ([a-z]+)\b", page.read_text(encoding="utf-8"), flags=re.M))
    return [f"{page.relative_to(ROOT)}: there is no command `scalelong {name}`" for name in sorted(used - known)]


def main() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    problems = [problem for page in pages for problem in [*broken_links(page), *unknown_commands(page)]]
    print("\n".join(problems) or f"{len(pages)} pages, no broken link, no unknown command")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
