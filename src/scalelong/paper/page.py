"""docs/paper.md from the JSON files of results/paper: the measurements next to the paper's, with verdicts."""

import os
from pathlib import Path
from typing import Any

from scalelong._text import with_interval
from scalelong.experiments.campaign import PLAN, SOONER, read_plan
from scalelong.experiments.campaign_results import Results, claims_table
from scalelong.paper.cost import minutes_on_two_cores
from scalelong.paper.items import ITEMS
from scalelong.paper.judge import VERDICTS
from scalelong.paper.run import RESULTS, read_result

PAGE = Path("docs") / "paper.md"
INTRODUCTION = Path(__file__).with_name("page.md")
# Item → campaigns that repeat it or run longer, and their measures that the item is about.
CAMPAIGNS = {
    "figure-1": (("digits-norms-repeat", "cifar10"), ("norm_outer", "norm_inner", "absolute_outer", "absolute_inner")),
    "figure-5": (("cifar10",), (SOONER,)),
    "table-1": (("cifar10",), ("val_loss_ema", "kid", "fid")),
}


def page(results: Path = RESULTS, at: Path = PAGE) -> str:
    """Return the page's text. Images are linked relative to `at`, where the page will be."""
    cpu = {name: read_result(results / f"{name}.json") for name in ITEMS}
    folder = Path(os.path.relpath(results, at.parent)).as_posix()
    parts = [INTRODUCTION.read_text(encoding="utf-8"), _summary(cpu)]
    for name, item in ITEMS.items():
        parts.append(f"## {name}\n\n**{item.title}.** The paper shows {item.shows}.\n")
        if (result := cpu[name]) is not None:
            parts.append(_section(result, folder, item.title))
        else:
            minutes = minutes_on_two_cores(item)
            parts.append(f"Not run. `scalelong paper {name}` runs it in about {minutes:.0f} min on 2 cores.\n")
        for campaign in CAMPAIGNS.get(name, ((), ()))[0]:
            parts.append(_campaign(results.parent / "campaign" / campaign, name))
        if (full := read_result(results / f"{name}-paper.json")) is not None:
            parts.append(_section(full, folder, f"{item.title}, at the paper's size"))
    return "\n".join(part.strip() + "\n" for part in parts if part)


def _summary(results: dict[str, dict[str, Any] | None]) -> str:
    rows = []
    for name, result in results.items():
        title, counts = ITEMS[name].title, [""] * len(VERDICTS)
        if result is None:
            title += ": **not run**"
        else:
            title += "" if result["complete"] else " (**incomplete**)"
            counts = [str(result["verdicts"][verdict] or "") for verdict in VERDICTS]
        rows.append((f"[{name}](#{name})", title, *counts))
    finished = [result for result in results.values() if result is not None]
    totals = [str(sum(result["verdicts"][verdict] for result in finished)) for verdict in VERDICTS]
    return "\n".join(["## Results", "", *_table(("item", "", *VERDICTS), [*rows, ("", "all claims", *totals)])])


def _section(result: dict[str, Any], folder: str, alt: str) -> str:
    lines = []
    if result["differs"]:
        lines += [f"Here: {result['differs']}.", ""]
    if not result["complete"]:
        total = result["runs"] + len(result["missing"])
        lines += [
            f"**Incomplete:** {result['runs']} of {total} runs are finished; missing: {', '.join(result['missing'])}. "
            f"Resume with `scalelong paper {result['item']}`.",
            "",
        ]
    lines += [f"- {failure}" for failure in result["failures"]] + ([""] if result["failures"] else [])
    claims = [
        (claim["claim"], claim["paper"], claim["predicted"], measured(claim), f"**{claim['verdict']}**")
        for claim in result["claims"]
    ]
    lines += [*_table(("claim", "paper", "predicted", "measured", "verdict"), claims), ""]
    lines += [f"![{alt}]({folder}/{result['figure']})", ""]
    for table in result["tables"]:
        lines += [f"*{table['title']}*", "", *_table(table["columns"], table["rows"]), ""]
    lines += [f"{note}\n" for note in result["notes"]]
    if result["processor_minutes"] is not None:
        lines.append(f"CPU time of the runs: {result['processor_minutes']:g} min.\n")
    return "\n".join(lines)


def _campaign(folder: Path, item: str) -> str:
    """What a campaign says about an item's claims; empty without its plan."""
    if not (folder / PLAN).exists():
        return ""
    results = Results(read_plan(folder))
    verdicts = [verdict for verdict in results.verdicts() if verdict.key in CAMPAIGNS[item][1]]
    if not verdicts:
        return ""
    title = results.plan.title
    anchor = "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
    head = f"**Campaign:** [{title}](campaign.md#{anchor}), {results.plan.steps:,} steps. {results.state}"
    columns, *rows = claims_table(verdicts)
    return "\n".join([head, "", *_table(columns, rows)])


def _table(columns: Any, rows: Any) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (columns, *rows)]
    return [lines[0], f"|{'---|' * len(columns)}", *lines[1:]]


def measured(claim: dict[str, Any]) -> str:
    """Format a claim's measurement: 0.412 [0.31, 0.55], a bound in words, or –."""
    if claim.get("bound"):
        return str(claim["bound"])
    estimate = claim["measured"]
    return "–" if estimate is None else with_interval(estimate["mean"], estimate["low"], estimate["high"])
