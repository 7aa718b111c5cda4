"""The report: one HTML file that loads nothing else, neither from the network nor from disk."""

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from scalelong._objectives import OBJECTIVES, READ_BY
from scalelong.experiments.comparison import Comparison, measure_run
from scalelong.files import check_target, write_text
from scalelong.report import sections
from scalelong.report.charts import charts, metrics, styles
from scalelong.report.findings import Findings, findings
from scalelong.report.markup import Markup, element, json_script, raw_script
from scalelong.report.pictures import pictures
from scalelong.report.read import RunView, differing_keys, is_scaling_key, labels, read_runs
from scalelong.version import __version__

# Losses compare only between runs that agree in these settings.
SAME = (
    *(f"data.{part}" for part in ("name", "hub_config", "validation", "holdout", "image_size", "channels")),
    *(f"data.{part}" for part in ("background", "vae", "latent_scale")), "validate.n",
    *(f"diffusion.{part}" for part in ("objective", *OBJECTIVES["eps"], *READ_BY)),
)  # fmt: skip
SCRIPTS = ("draw.js", "lines.js", "forest.js", "page.js")  # in one scope, in this order


def write_report(paths: Sequence[Path | str], out: Path | str) -> Path:
    """Write the page of runs, or of all runs in the folder of a comparison. Returns its path."""
    out = Path(out)
    check_target(out)
    write_text(out, render(read_runs(paths)))
    return out


@dataclass(frozen=True)
class Choice:
    """What a search found, for the top of a page: a summary, the line above it, a table, pictures with captions."""

    summary: Findings
    facts: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    command: str
    pictures: Mapping[str, Path] = field(default_factory=dict)

    def section(self) -> Markup | None:
        head = element("tr", [element("th", column, scope="col") for column in self.columns])
        body = [
            element("tr", element("th", row[0], scope="row"), [element("td", cell) for cell in row[1:]])
            for row in self.rows
        ]
        shown = [
            element(
                "figure",
                element("img", src=_data_url(path), alt=caption, style="max-width:100%"),
                element("figcaption", caption),
                class_="wide",
            )
            for caption, path in self.pictures.items()
        ]
        table = element("table", element("thead", head), element("tbody", body))
        table = element("div", element("div", table, class_="scroll"), class_="table")
        return sections.section("search", "Search", "", element("pre", element("code", self.command)), table, shown)


def write_choice(choice: Choice, out: Path | str, runs: Sequence[Path | str] = ()) -> Path:
    """Write the page of a search, followed by the report of `runs`. Returns its path."""
    check_target(out)
    text = render(read_runs(runs), choice) if runs else _document(choice.summary.headline, [
        sections.headline(choice.summary, choice.facts, {}), element("main", choice.section()),
    ])  # fmt: skip
    write_text(Path(out), text)
    return Path(out)


def _data_url(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode("ascii")


def render(views: Sequence[RunView], choice: Choice | None = None) -> str:
    """The page as text. A choice replaces the headline and comes first."""
    comparison = compare_views(views)
    drawn = charts(views, comparison)
    settings = [view.run.settings for view in views]
    others = [key for key in differing_keys(settings) if key != "seed" and not is_scaling_key(key)]
    only_scaling_differs = len(views) > 1 and all(settings) and not others
    data = _common(views, "data.name") or "several datasets"
    data = Path(data).name if Path(data).is_absolute() else data
    steps = max(view.run.logged_step for view in views)
    summary = choice.summary if choice else findings(comparison, labels(views), steps, data)
    sources = ", ".join(view.name for view in views[:6]) + (" …" if len(views) > 6 else "")
    unfinished = {view.name: _progress(view) for view in views if not view.finished}
    body = [
        sections.headline(summary, choice.facts if choice else _facts(views, data, steps), unfinished),
        sections.legend(views),
        element("main", [
            choice.section() if choice else None,
            sections.samples(views, pictures([view.run for view in views])),
            sections.results(comparison, views, drawn),
            sections.curves(drawn, only_scaling_differs, comparison.baseline if comparison else "", metrics(views)),
            sections.norms(drawn, views, comparison),
            sections.skips(drawn),
            sections.robustness(drawn, views),
            sections.evaluation(views),
            sections.configs(views),
        ]),
        element(
            "footer",
            element("p", f"Written by scalelong {__version__} on {time.strftime('%Y-%m-%d %H:%M')} from {sources}."),
            element("p", "Long skips are counted from the outermost, i = 1. Long curves are thinned; those of losses "
                    "and gradients keep the range of each point."),
        ),
        element("div", id="said", class_="said", aria_live="polite"),
    ]  # fmt: skip
    return _document(summary.headline, body, {"runs": styles(views), "charts": drawn})


def compare_views(views: Sequence[RunView]) -> Comparison | None:
    """Means and paired ratios of the finished runs; None if their losses do not compare."""
    if any(key in SAME for key in differing_keys([view.run.settings for view in views])):
        return None
    measured, missing, failed = [], [], []
    for view in views:
        seed = -1 if view.seed is None else view.seed
        if view.finished:
            measured.append(measure_run(view.run, view.label, seed))
        else:
            missing.append(f"{view.name} {_progress(view)}")
            failed += [(view.label, seed)] if view.run.became_nonfinite else []
    return Comparison(
        measured,
        labels(views),
        preset=_common(views, "preset") or "",
        objective=_common(views, "diffusion.objective") or "eps",
        steps=max(view.run.logged_step for view in views),
        seeds=sorted({*(run.seed for run in measured), *(seed for _, seed in failed)}) or [0],
        missing=missing,
        failed=failed,
    )


def _progress(view: RunView) -> str:
    """How far an unfinished run is, and the error that stopped it."""
    reached = f"is not finished: step {view.run.logged_step:,} of {view.run.settings.get('train.steps')}"
    return f"{reached}: {view.run.failure}" if view.run.failure else reached


def _document(title: str, body: Sequence[Markup | None], data: object = None) -> str:
    parts = "\n".join(map(_asset, SCRIPTS))
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    # The page loads nothing and runs no other script, whatever the name of a run contains.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    if data is None:  # nothing to draw
        policy = policy.partition("; script-src")[0]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} — scalelong"),
        raw_script("style", _asset("page.css")),
    )
    scripts = [] if data is None else [json_script("data", data), raw_script("script", script)]
    without = element("p", "A script in this page draws the charts, and scripts are disabled.")
    noscript = element("noscript", without) if scripts else None
    return f"<!DOCTYPE html>\n{element('html', head, element('body', noscript, body, scripts), lang='en')}\n"


def _asset(name: str) -> str:
    return resources.files("scalelong.report").joinpath(name).read_text(encoding="utf-8")


def _facts(views: Sequence[RunView], data: str, steps: int) -> list[str]:
    """The line above the headline."""
    runs = "1 run" if len(views) == 1 else f"{len(views)} runs"
    seeds = len({view.seed for view in views})
    runs += f" with {seeds} seeds" if seeds > 1 else ""
    facts = ["scalelong", _common(views, "preset") or "", data, runs, f"{steps:,} step{'' if steps == 1 else 's'}"]
    objective = _common(views, "diffusion.objective")
    if objective not in (None, "eps"):
        facts.append(f"objective {objective}")
    sizes = sorted(n for view in views if isinstance(n := view.run.record.get("parameters"), int))
    if sizes:
        facts.append("–".join(dict.fromkeys(f"{n / 1e6:.2f}M" for n in (sizes[0], sizes[-1]))) + " parameters")
    return [fact for fact in dict.fromkeys(facts) if fact]


def _common(views: Sequence[RunView], key: str) -> str | None:
    """The value of a setting if all runs share it."""
    values = {str(view.run.settings[key]) for view in views if key in view.run.settings}
    return values.pop() if len(values) == 1 else None
