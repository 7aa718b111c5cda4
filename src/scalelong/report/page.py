"""The report: one HTML file that needs nothing else, neither network nor script of others."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from scalelong.experiments.comparison import Comparison, summarise
from scalelong.experiments.distance import read_distance, read_on_the_way
from scalelong.experiments.measures import measure
from scalelong.files import check_target, write_text
from scalelong.report import cards, sections
from scalelong.report.charts import charts, looks
from scalelong.report.findings import findings
from scalelong.report.markup import Markup, element, join, json_script, raw_script
from scalelong.report.pictures import sample_frames
from scalelong.report.read import RunView, labels, read_runs
from scalelong.report.robustness import robustness_charts, robustness_section
from scalelong.version import __version__

# Without these in common, a loss is not comparable with another.
SAME = ("data.name", "data.validation", "data.image_size", "diffusion.process", "validate.n", "data.vae")


SCRIPTS = ("draw.js", "lines.js", "forest.js", "page.js")  # in one scope, in this order


def write_report(paths: Sequence[Path | str], out: Path | str) -> Path:
    """Read run folders (or the folder of a comparison) and write the page."""
    out = Path(out)
    check_target(out)
    page = render(read_runs(paths))
    write_text(out, page)
    return out


def render(runs: Sequence[RunView]) -> str:
    """The page as text."""
    comparison = compare_views(runs)
    drawn = charts(runs, comparison) | robustness_charts(runs)
    there = set(drawn)
    data = _common(runs, "data.name") or "several datasets"
    steps = max(run.step for run in runs)
    found = findings(comparison, labels(runs), steps, data)
    frames = sample_frames([run.folder for run in runs], [_tile(run) for run in runs])
    body = [
        sections.headline(found, _facts(runs, data, steps)),
        sections.legend(runs),
        element("main", [
            None if comparison is None else sections.results(comparison, runs, "forest" in there),
            sections.curves(there, _scaling_alone(runs), "" if comparison is None else comparison.baseline),
            sections.oscillation(there, runs),
            sections.skips(there),
            sections.samples(runs, frames),
            robustness_section(runs, there),
            cards.evaluation(runs),
            cards.configs(runs),
        ]),
        sections.footer(_about(runs)),
        element("div", id="said", class_="said", aria_live="polite"),
    ]  # fmt: skip
    return _document(found.headline, body, {"runs": looks(runs), "charts": drawn})


def compare_views(runs: Sequence[RunView]) -> Comparison | None:
    """Means and paired ratios of what the runs hold; None where their losses do not compare."""
    if any(len({repr(run.settings.get(key)) for run in runs}) > 1 for key in SAME):
        return None
    finished = [run for run in runs if _finished(run)]
    unfinished = [run for run in runs if not _finished(run)]
    missing = [f"{run.name} is at step {run.step:,} of {run.settings.get('train.steps')}" for run in unfinished]
    measured = [
        measure(run.label, -1 if run.seed is None else run.seed, run.folder, run.columns, run.watch,
                {"frechet": read_distance(run.folder), "on_the_way": read_on_the_way(run.folder)}, run.resources)
        for run in finished
    ]  # fmt: skip
    seeds = sorted({m.seed for m in measured}) or [0]
    preset = _common(runs, "preset") or ""
    return summarise(
        measured, labels(runs), preset=preset, steps=max(run.step for run in runs), seeds=seeds, missing=missing
    )


def _document(title: str, body: Sequence[Markup | None], data: object) -> str:
    style, parts = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # Nothing is fetched and no other script runs, whatever a run is called.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} — scalelong"),
        raw_script("style", style),
    )
    scripts = [json_script("data", data), raw_script("script", script)]
    noscript = element("noscript", element("p", "The charts are drawn by a script in this page; it is switched off."))
    return f"<!DOCTYPE html>\n{element('html', head, element('body', noscript, join(body), scripts), lang='en')}\n"


def _asset(name: str) -> str:
    return resources.files("scalelong.report").joinpath(name).read_text(encoding="utf-8")


def _facts(runs: Sequence[RunView], data: str, steps: int) -> list[str]:
    parameters = _parameters(runs)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    facts = ["scalelong", _common(runs, "preset") or "", data, count, f"{steps:,} steps", parameters]
    return [fact for fact in dict.fromkeys(facts) if fact]


def _parameters(runs: Sequence[RunView]) -> str:
    counts = [n for run in runs if isinstance(n := run.record.get("parameters"), int)]
    if not counts:
        return ""
    low, high = (f"{n / 1e6:.2f}M" for n in (min(counts), max(counts)))
    return f"{low} parameters" if low == high else f"{low}–{high} parameters"


def _about(runs: Sequence[RunView]) -> list[str]:
    return [
        f"Written by scalelong {__version__} on {time.strftime('%Y-%m-%d %H:%M')} from "
        f"{', '.join(run.name for run in runs[:6])}{' …' if len(runs) > 6 else ''}.",
        "Long skips are counted from the outermost, i = 1. Curves are thinned to "
        "points that keep the least and the greatest value of what they stand for.",
    ]


def _common(runs: Sequence[RunView], key: str) -> str | None:
    values = {str(run.settings[key]) for run in runs if key in run.settings}
    return values.pop() if len(values) == 1 else None


def _scaling_alone(runs: Sequence[RunView]) -> bool:
    """Whether the runs differ in nothing but their scaling and seed."""
    rest = [
        {
            key: value
            for key, value in run.settings.items()
            if key not in ("seed", "kappa") and not key.startswith("scaling.")
        }
        for run in runs
    ]
    return len(runs) > 1 and all(own and own == rest[0] for own in rest)


def _finished(run: RunView) -> bool:
    asked = run.settings.get("train.steps")
    return not isinstance(asked, int) or run.step >= asked


def _tile(run: RunView) -> int | None:
    """The side of one sample in a grid, where the run tells."""
    shapes = run.record.get("shapes")
    if run.settings.get("data.vae") is not None or not isinstance(shapes, dict):
        return None
    size = shapes.get("size")
    return size if isinstance(size, int) and 0 < size <= 1024 else None
