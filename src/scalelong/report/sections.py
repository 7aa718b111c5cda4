"""The parts of the page, top to bottom. Each gives its HTML, or None where the runs have nothing for it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from scalelong.experiments.comparison import Comparison
from scalelong.experiments.statistics import statement
from scalelong.experiments.table import change, plus_minus, sooner
from scalelong.report.findings import Findings
from scalelong.report.markup import Markup, element, join
from scalelong.report.pictures import Frame
from scalelong.report.read import RunView, labels


def section(identity: str, title: str, lead: str | Markup, *children: Markup | None) -> Markup:
    """A part with its heading and a sentence or two that say how to read it."""
    return element("section", element("h2", title), element("p", lead, class_="lead"), *children, id=identity)


def figure(chart: str, title: str, caption: str, wide: bool = False) -> Markup:
    """A place for the script to draw in, and what it shows."""
    return element(
        "figure",
        element("h3", title),
        element("div", class_="chart", data_chart=chart, aria_label=f"{title}. Arrow keys move the cursor."),
        element("figcaption", caption),
        class_="wide" if wide else None,
    )


def member(runs: Sequence[RunView]) -> str:
    """The runs that a part of the page belongs to, for the legend to hide it with them."""
    return " ".join(str(run.index) for run in runs)


def headline(found: Findings, facts: Sequence[str]) -> Markup:
    details = [element("li", _unbroken(line)) for line in found.details]
    return element(
        "header",
        element("p", " · ".join(facts), class_="over"),
        element("h1", _unbroken(found.headline)),
        element("ul", details, class_="details") if details else None,
        element("p", _unbroken(found.caveat), class_="caveat") if found.caveat else None,
    )


def _unbroken(text: str) -> str:
    """No line ends before a per cent sign."""
    return text.replace(" %", "\u00a0%")


def legend(runs: Sequence[RunView]) -> Markup:
    """A button a variant, and one a seed where there are several; they hide a run everywhere."""
    chips = []
    for label in labels(runs):
        own = [run for run in runs if run.label == label]
        main = element("button", element("span", label), type="button", class_="chip", data_toggle=member(own),
                       aria_pressed="true", title=", ".join(run.name for run in own))  # fmt: skip
        seeds = [
            element(
                "button",
                str(run.seed),
                type="button",
                class_="seed",
                data_toggle=member([run]),
                aria_pressed="true",
                aria_label=f"{label}, seed {run.seed}",
            )
            for run in own
        ]
        chips.append(element("li", main, seeds if len(own) > 1 else None))
    controls = element(
        "div",
        element("label", element("input", type="checkbox", id="log"), " log axis"),
        element(
            "label",
            "smoothing ",
            element("input", type="range", id="smooth", min="0", max="0.98", step="0.02", value="0.6"),
        ),
        element("button", "show all", type="button", id="all", class_="plain"),
        class_="controls",
    )
    return element("nav", element("ul", chips), controls, class_="legend", aria_label="Runs: press to hide or show")


def results(comparison: Comparison, runs: Sequence[RunView], has_forest: bool) -> Markup | None:
    """The table of means and paired ratios, and the picture of the ratios."""
    if not comparison.measures():
        return None
    by_label = {label: [run for run in runs if run.label == label] for label in (r.variant for r in comparison.rows)}
    head = [element("th", "", scope="col")]
    for row in comparison.rows:
        own = by_label[row.variant]
        mark = element("span", data_swatch=own[0].index) if own else None
        note = element("small", "baseline") if row.variant == comparison.baseline else None
        head.append(element("th", mark, " ", row.variant, " ", note, scope="col", data_member=member(own)))
    body = []
    for measure in comparison.measures():
        cells = [element("th", measure.title, element("small", measure.note), scope="row")]
        for row in comparison.rows:
            mean, ratio = row.means.get(measure.key), row.ratios.get(measure.key)
            shown = [] if mean is None else [element("span", plus_minus(mean), class_="mean")]
            if ratio is not None:
                shown.append(element("small", change(ratio)))
            cells.append(element("td", shown or "–", data_member=member(by_label[row.variant])))
        body.append(element("tr", cells))
    for key, title in comparison.curves().items():
        cells = [element("th", "sooner", element("small", f"at the baseline's final {title}"), scope="row")]
        for row in comparison.rows:
            found = row.sooner.get(key)
            said = "" if found is None else sooner(found)
            cells.append(element("td", element("span", said, class_="mean"), data_member=member(by_label[row.variant])))
        body.append(element("tr", cells))
    table = element("table", element("thead", element("tr", head)), element("tbody", body))
    notes = [element("li", line) for line in (*comparison.notes, *(f"missing: {line}" for line in comparison.missing))]
    picture = (
        figure(
            "forest",
            f"Against {comparison.baseline}",
            "Ratio to the baseline's run of the same seed; left of the line is less. A tick is a seed, the mark their "
            "geometric mean, the bar its 95 % interval (none for one seed).",
            wide=True,
        )
        if has_forest
        else None
    )
    return section(
        "results",
        "Results",
        statement(len(comparison.seeds)),
        picture,
        element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Results"),
        element("ul", notes, class_="notes") if notes else None,
    )


def curves(there: set[str], scaling_alone: bool, baseline: str) -> Markup | None:
    shown = [
        ("loss", "Training loss", "On the batches of training; shaded: the range within a point of the curve."),
        ("validation", "Validation loss", "Held-out images with fixed noise and times, the same for every run."),
        ("validation_ema", "Validation loss of the EMA", "The averaged network, which is what one samples from."),
        (
            "relative",
            f"Validation loss against {baseline}",
            "In per cent of the baseline's at the same step and seed; below the dashed line is better.",
        ),
        ("fid", "FID", "Of samples from the EMA network, measured by training on its way."),
        ("frechet", "Fréchet distance", "Of samples from the EMA network, by training on its way; this is not FID."),
        ("gradient", "Gradient norm", "Of the whole gradient, before clipping."),
    ]
    figures = [figure(*entry) for entry in shown if entry[0] in there]
    if not figures:
        return None
    lead = "Means over the points of a curve; the bar above smooths and switches to a logarithmic axis."
    if scaling_alone:
        lead = "Runs of one seed see the same images, times and noise in the same order; only their scaling differs."
    return section("curves", "Training", lead, element("div", figures, class_="figures"))


def oscillation(there: set[str], runs: Sequence[RunView]) -> Markup | None:
    shown = [
        (
            "oscillation",
            "Feature oscillation by skip",
            "Standard deviation of the jumps of log‖hᵢ‖ over one step, on one fixed probe batch, in the second half of "
            "training. hᵢ is what long skip i joins; the last is the middle block's output.",
        ),
        (
            "oscillation_train",
            "The same on training batches",
            "Here the sampled images and times change from step to step too, and their share is not the network's.",
        ),
        (
            "oscillation_gradient",
            "Gradient oscillation by skip",
            "The same of the gradient norm, before clipping, in the block that consumes long skip i.",
        ),
    ]
    figures = [figure(*entry) for entry in shown if entry[0] in there]
    panels = None
    if "norms" in there:
        panels = figure(
            "norms",
            "Feature norms over training",
            "‖hᵢ‖, what long skip i joins, on the probe batch. A calm network draws a smooth line (the paper's Figs. 1 "
            "and 12).",
            wide=True,
        )
    alarms = _alarms(runs)
    if not figures and panels is None and alarms is None:
        return None
    lead = "How much features and gradients jump from one step to the next, skip by skip (i = 1 is the outermost)."
    return section("oscillations", "Oscillation", lead, element("div", figures, class_="figures three"), panels, alarms)


def _alarms(runs: Sequence[RunView]) -> Markup | None:
    watched = [run for run in runs if run.watch is not None]
    if not watched:
        return None
    items = []
    for run in watched:
        assert run.watch is not None
        lines = run.watch.alarms()
        said = element("ul", [element("li", line) for line in lines[:20]]) if lines else " no alarm"
        more = element("p", f"and {len(lines) - 20} more") if len(lines) > 20 else None
        items.append(element("li", element("strong", run.name), said, more, data_member=member([run])))
    return element("details", element("summary", "Alarms of the monitor"), element("ul", items, class_="alarms"))


def skips(there: set[str]) -> Markup | None:
    shown = [
        (
            "kappa",
            "κᵢ by skip",
            "At the end of training. Shaded: κ^(i−1) for κ from 0.5 to 0.95, the range that Section 4.1 gives CS "
            "(Fig. 7). Bars: the range of learned coefficients over tokens or channels of the probe.",
        ),
        (
            "ratio",
            "Skip against backbone",
            "‖κᵢ·xᵢ‖/‖hᵢ‖ where long skip i joins, on the probe at the end of training.",
        ),
    ]
    figures = [figure(*entry) for entry in shown if entry[0] in there]
    if not figures:
        return None
    more = None
    if "ratios" in there:
        inner = figure("ratios", "Skip against backbone over training", "The same ratio at every look.", wide=True)
        more = element("details", element("summary", "The ratios over training"), inner, class_="print")
    lead = "How strongly each long skip is scaled, and how much of it arrives beside the backbone."
    return section("skips", "Long skips", lead, element("div", figures, class_="figures"), more)


def samples(runs: Sequence[RunView], frames: Sequence[Sequence[Frame]]) -> Markup | None:
    """The grids of all runs at one step, with a slider over the steps."""
    steps = sorted({frame.step for own in frames for frame in own})
    if not steps:
        return None
    grids = []
    for run, own in zip(runs, frames, strict=True):
        if not own:
            continue
        images = [
            element(
                "img",
                src=frame.address,
                alt=f"Samples of {run.name} at step {frame.step}",
                width=frame.width,
                height=frame.height,
                data_step=frame.step,
                class_="pixelated" if frame.pixelated else None,
                hidden=frame is not own[-1],
            )
            for frame in own
        ]
        seed = "" if run.seed is None or len({other.seed for other in runs}) < 2 else f" · seed {run.seed}"
        title = element("figcaption", element("span", data_swatch=run.index), " ", run.label, seed)
        grids.append(element("figure", title, images, class_="samples", data_member=member([run])))
    slider = None
    if len(steps) > 1:
        last = len(steps) - 1
        slider = element(
            "p",
            element("label", "From first to last ", element("input", type="range", id="frame", min="0", max=last,
                    step="1", value=last, data_steps=json.dumps(steps))),
            " ", element("output", f"step {steps[-1]:,}", id="frame-step"),
            class_="slider",
        )  # fmt: skip
    lead = "From the EMA network, and from the same noise in every run."
    return section("samples", "Samples", lead, slider, element("div", grids, class_="grids"))


def footer(lines: Sequence[str]) -> Markup:
    return element("footer", join([element("p", line) for line in lines]))
