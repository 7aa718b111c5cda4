"""docs/paper.md from the JSON files of results/paper: what was measured, beside the paper, with the verdicts."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from scalelong.files import write_text
from scalelong.paper import regime, verdict
from scalelong.paper.cost import minutes_on_two_cores
from scalelong.paper.registry import ITEMS
from scalelong.paper.run import RESULTS, read_result
from scalelong.paper.verdict import VERDICTS

PAGE = Path("docs") / "paper.md"
HEAD = """# The paper's tables and figures at a size a CPU can run

```bash
scalelong paper list                            # every item, what it shows, its cost, its state
scalelong paper figure-1                        # train what is missing, judge, write results/paper/figure-1.json, .png
scalelong paper table-1 --size paper --dry-run  # the same at the paper's size: commands, steps, GPU-hours
scalelong paper page                            # this page, from the JSON files
```

Runs are kept in `runs/paper` and shared between items; the same command goes on where it stopped. `--no-train` judges
what is there. This page is generated from the JSON files in `results/paper`; nothing in it is written by hand
but this introduction.
"""


def page(results: Path = RESULTS, at: Path = PAGE) -> str:
    """The page's text, with images linked relative to where the page will be."""
    found = {name: read_result(results / f"{name}.json") for name in ITEMS}
    full = {name: read_result(results / f"{name}-paper.json") for name in ITEMS}
    folder = Path(os.path.relpath(results, at.parent)).as_posix()
    parts = [HEAD, _rule(), _summary(found)]
    for name in ITEMS:
        parts.append(_section(name, found[name], folder))
        if (other := full[name]) is not None:
            parts.append(_body(other, folder, f"{ITEMS[name].title}, at the paper's size"))
    return "\n".join(part.strip() + "\n" for part in parts)


def write_page(results: Path = RESULTS, at: Path = PAGE) -> Path:
    write_text(at, page(results, at))
    return at


def _rule() -> str:
    """The regime and the rule, as their modules state them."""
    parts = ("## The regime", _text(inspect.getdoc(regime)), "## The rule", _text(inspect.getdoc(verdict)))
    return "\n\n".join(parts) + "\n"


def _text(doc: str | None) -> str:
    """A docstring as Markdown: its first line as a sentence, its indented table as code."""
    lines, fenced = [], False
    for line in (doc or "").splitlines():
        indented = line.startswith("    ")
        if indented and not fenced:
            lines.append("```")
        if fenced and not indented:
            lines.append("```")
        fenced = indented
        lines.append(line[4:] if indented else line)
    return "\n".join(lines)


def _summary(found: dict[str, dict[str, Any] | None]) -> str:
    rows = ["## What came out", "", f"| item | | {' | '.join(VERDICTS)} |", f"|---|---|{'---|' * len(VERDICTS)}"]
    for name, result in found.items():
        link = f"[{name}](#{name})"
        if result is None:
            rows.append(f"| {link} | {ITEMS[name].title}: **not run** |{' |' * len(VERDICTS)}")
            continue
        state = "" if result["complete"] else " (**incomplete**)"
        counts = " | ".join(str(result["verdicts"][v] or "") for v in VERDICTS)
        rows.append(f"| {link} | {ITEMS[name].title}{state} | {counts} |")
    done = [result for result in found.values() if result is not None]
    totals = " | ".join(str(sum(result["verdicts"][v] for result in done)) for v in VERDICTS)
    rows.append(f"| | claims in all | {totals} |")
    return "\n".join(rows) + "\n"


def _section(name: str, result: dict[str, Any] | None, folder: str) -> str:
    item = ITEMS[name]
    head = f"## {name}\n\n**{item.title}.** The paper shows {item.shows}.\n"
    if result is None:
        minutes = minutes_on_two_cores(item)
        return f"{head}\nNot run. `scalelong paper {name}` runs it in about {minutes:.0f} min on 2 cores.\n"
    return head + "\n" + _body(result, folder, item.title)


def _body(result: dict[str, Any], folder: str, alt: str) -> str:
    lines = []
    if result["differs"]:
        lines += [f"Here: {result['differs']}.", ""]
    if not result["complete"]:
        total = result["runs"] + len(result["missing"])
        lines += [
            f"**Incomplete:** {result['runs']} of {total} runs are there; missing: {', '.join(result['missing'])}. "
            f"`scalelong paper {result['item']}` goes on.",
            "",
        ]
    lines += [f"- {line}" for line in result["failures"]] + ([""] if result["failures"] else [])
    lines += ["| claim | the paper | predicted | measured | verdict |", "|---|---|---|---|---|"]
    for claim in result["claims"]:
        cells = (claim["claim"], claim["paper"], claim["predicted"], measured(claim), f"**{claim['verdict']}**")
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    lines += ["", f"![{alt}]({folder}/{result['figure']})", ""]
    for table in result["tables"]:
        lines += [f"*{table['title']}*", "", f"| {' | '.join(_cell(c) for c in table['columns'])} |"]
        lines += [f"|{'---|' * len(table['columns'])}"]
        lines += [f"| {' | '.join(_cell(c) for c in row)} |" for row in table["rows"]] + [""]
    lines += [f"{note}\n" for note in result["notes"]]
    if result["processor_minutes"] is not None:
        lines.append(f"Processor time of its runs: {result['processor_minutes']:g} min.\n")
    return "\n".join(lines)


def measured(claim: dict[str, Any]) -> str:
    """0.412 [0.31, 0.55], or –."""
    found = claim["measured"]
    if found is None:
        return "–"
    if found["low"] is None:
        return f"{found['mean']:.4g}"
    return f"{found['mean']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
