"""The parts of the page from top to bottom. Each returns its HTML, or None if the runs have no data for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from scalelong._text import number, with_interval
from scalelong.experiments.comparison import Comparison
from scalelong.experiments.statistics import statistics_note
from scalelong.report.findings import Findings
from scalelong.report.markup import Child, Markup, element
from scalelong.report.pictures import Frame
from scalelong.report.read import RunView, differing_keys, labels

# The charts of each section: name, title, caption.
CURVES = [
    ("loss", "Training loss", "On training batches; shaded: the range within a point of the curve."),
    ("validation", "Validation loss", "Held-out images with fixed noise and times, the same for every run."),
    ("validation_ema", "Validation loss of the EMA", "The averaged network, which generates the samples."),
    ("relative", "Validation loss against {baseline}",
     "In percent of the baseline's at the same step and seed; below the dashed line is better."),
    ("fid", "FID", "Of samples from the EMA network, measured during training."),
    ("frechet", "Fréchet distance", "Of samples from the EMA network, measured during training; this is not FID."),
    ("gradient", "Gradient norm", "Of the whole gradient, before clipping."),
]  # fmt: skip
OSCILLATION = [
    ("oscillation", "Feature oscillation by skip",
     "Standard deviation of the jumps of log‖hᵢ‖ over one step, on one fixed probe batch, in the second half of "
     "training. Long skip i joins hᵢ; the last is the middle block's output."),
    ("oscillation_train", "The same on training batches",
     "Here the sampled images and times also change from step to step, which is not the network's doing."),
    ("oscillation_gradient", "Gradient oscillation by skip",
     "The same of the gradient norm, before clipping, in the block that consumes long skip i."),
]  # fmt: skip
NORMS = ("norms", "Feature norms over training",
         "‖hᵢ‖, which long skip i joins, on the probe batch. A stable network draws a smooth line (the paper's Figs. 1 "
         "and 12).")  # fmt: skip
SKIPS = [
    ("kappa", "κᵢ by skip",
     "At the end of training. Shaded: κ^(i−1) for κ from 0.5 to 0.95, the range that Section 4.1 gives CS (Fig. 7). "
     "Bars: the range of learned coefficients over tokens or channels of the probe."),
    ("ratio", "Skip against backbone", "‖κᵢ·xᵢ‖/‖hᵢ‖ where long skip i joins, on the probe at the end of training."),
]  # fmt: skip
RATIOS = ("ratios", "Skip against backbone over training", "The same ratio at every snapshot.")
ROBUSTNESS = [
    ("robust_change", "Change of the prediction", "E‖ε̂(x_t + δ) − ε̂(x_t)‖²/m against σ_δ², on held-out images."),
    ("robust_loss", "Loss with extra noise", "The loss at x_t + δ against σ_δ²."),
    ("robust_distance", "Samples with extra noise",
     "Fréchet distance of samples when every network evaluation sees x + δ; bars: 95 % over the samples."),
    ("lipschitz", "Local Lipschitz constant", "‖∂ε̂/∂x_t‖₂ at the middle of each timestep bin, a lower estimate."),
]  # fmt: skip
FOREST = (
    "Ratio to the baseline's run of the same seed; left of the line is less. A tick is a seed, the mark their "
    "geometric mean, the bar its 95 % interval (none for one seed)."
)
CARD = {
    "N": ("n",),
    "reference": ("reference", "name"),
    "split": ("reference", "split"),
    "N of the reference": ("reference", "n"),
    "extractor": ("extractor",),
    "weights": ("weights",),
    "resize": ("resize",),
    "sampler": ("generation", "sampler"),
    "evaluations per sample": ("generation", "evaluations"),
    "guidance": ("generation", "guidance"),
    "EMA": ("generation", "ema"),
    "sample seed": ("generation", "sample_seed"),
    "step": ("generation", "step"),
    "measured": ("created",),
}

# ------------------------------------------------------------------------------------------------ building blocks


def member(views: Sequence[RunView]) -> str:
    """The runs that an element belongs to. The legend hides it together with them."""
    return " ".join(str(view.index) for view in views)


def section(identity: str, title: str, lead: str, *children: Child) -> Markup:
    """A section with its heading and a sentence or two on how to read it."""
    return element("section", element("h2", title), element("p", lead, class_="lead"), *children, id=identity)


def figure(chart: str, title: str, caption: str, wide: bool = False) -> Markup:
    """An empty element that the script draws a chart into, with title and caption."""
    return element(
        "figure",
        element("h3", title),
        element("div", class_="chart", data_chart=chart, aria_label=f"{title}. Arrow keys move the cursor."),
        element("figcaption", caption),
        class_="wide" if wide else None,
    )


def figures(catalogue: Sequence[tuple[str, str, str]], drawn: set[str], class_: str = "figures") -> Markup | None:
    """The charts of a section that have data."""
    shown = [figure(*entry) for entry in catalogue if entry[0] in drawn]
    return element("div", shown, class_=class_) if shown else None


def table(
    columns: Sequence[tuple[Child, Sequence[RunView]]],
    rows: Sequence[tuple[Child, Sequence[Child], bool]],
    label: str,
    corner: str = "",
) -> Markup:
    """A table that scrolls sideways: (heading, runs) of each column; (heading, cells, marked) of each row."""
    head = [element("th", title, scope="col", data_member=member(views)) for title, views in columns]
    body = []
    for title, cells, marked in rows:
        row = [
            element("td", cell, data_member=member(views), class_="differs" if marked else None)
            for cell, (_, views) in zip(cells, columns, strict=True)
        ]
        body.append(element("tr", element("th", title, scope="row"), row))
    content = element(
        "table", element("thead", element("tr", element("th", corner, scope="col"), head)), element("tbody", body)
    )
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def notes(lines: Sequence[str]) -> Markup | None:
    return element("ul", [element("li", line) for line in lines], class_="notes") if lines else None


# -------------------------------------------------------------------------------------------------------- sections


def headline(summary: Findings, facts: Sequence[str]) -> Markup:
    details = [element("li", _unbroken(line)) for line in summary.details]
    return element(
        "header",
        element("p", " · ".join(facts), class_="over"),
        element("h1", _unbroken(summary.headline)),
        element("ul", details, class_="details") if details else None,
        element("p", _unbroken(summary.caveat), class_="caveat") if summary.caveat else None,
    )


def _unbroken(text: str) -> str:
    """Keep a percent sign on the line of its number."""
    return text.replace(" %", "\u00a0%")


def legend(views: Sequence[RunView]) -> Markup:
    """A button per variant, and one per seed if there are several; they hide runs on the whole page."""

    def button(text: Child, own: Sequence[RunView], kind: str, **attributes: str) -> Markup:
        return element(
            "button", text, type="button", class_=kind, data_toggle=member(own), aria_pressed="true", **attributes
        )

    chips = []
    for label in labels(views):
        own = [view for view in views if view.label == label]
        seeds = [button(str(v.seed), [v], "seed", aria_label=f"{label}, seed {v.seed}") for v in own]
        chip = button(element("span", label), own, "chip", title=", ".join(view.name for view in own))
        chips.append(element("li", chip, seeds if len(own) > 1 else None))
    smoothing = element("input", type="range", id="smooth", min="0", max="0.98", step="0.02", value="0.6")
    controls = element(
        "div",
        element("label", element("input", type="checkbox", id="log"), " log axis"),
        element("label", "smoothing ", smoothing),
        element("button", "show all", type="button", id="all", class_="plain"),
        class_="controls",
    )
    return element("nav", element("ul", chips), controls, class_="legend", aria_label="Runs: press to hide or show")


def results(comparison: Comparison, views: Sequence[RunView], drawn: set[str]) -> Markup | None:
    """The table of means and paired ratios, and the chart of the ratios."""
    if not comparison.measures():
        return None
    columns: list[tuple[Child, list[RunView]]] = []
    for row in comparison.rows:
        own = [view for view in views if view.label == row.variant]
        swatch = element("span", data_swatch=own[0].index) if own else None
        note = element("small", "baseline") if row.variant == comparison.baseline else None
        columns.append(([swatch, " ", row.variant, " ", note], own))
    rows: list[tuple[Child, list[Child], bool]] = [
        (
            [title, element("small", note)],
            [[element("span", mean, class_="mean"), element("small", change) if change else None]
             for mean, change in cells],
            False,
        )
        for title, note, cells in comparison.table()
    ]  # fmt: skip
    forest = figure("forest", f"Against {comparison.baseline}", FOREST, wide=True) if "forest" in drawn else None
    return section(
        "results",
        "Results",
        statistics_note(len(comparison.seeds)),
        forest,
        table(columns, rows, "Results"),
        notes([*comparison.notes, *(f"missing: {line}" for line in comparison.missing)]),
    )


def curves(drawn: set[str], only_scaling_differs: bool, baseline: str) -> Markup | None:
    shown = figures([(name, title.format(baseline=baseline), caption) for name, title, caption in CURVES], drawn)
    lead = "Means over the points of a curve; the bar above smooths and switches to a logarithmic axis."
    if only_scaling_differs:
        lead = "Runs of one seed see the same images, times and noise in the same order; only their scaling differs."
    return section("curves", "Training", lead, shown) if shown else None


def oscillation(drawn: set[str], views: Sequence[RunView]) -> Markup | None:
    panels = figure(*NORMS, wide=True) if "norms" in drawn else None
    charts, alarms = figures(OSCILLATION, drawn, "figures three"), _alarms(views)
    if charts is None and panels is None and alarms is None:
        return None
    lead = "How much features and gradients jump from one step to the next, skip by skip (i = 1 is the outermost)."
    return section("oscillations", "Oscillation", lead, charts, panels, alarms)


def _alarms(views: Sequence[RunView]) -> Markup | None:
    items = []
    for view in views:
        if view.run.stability is None:
            continue
        lines = view.run.stability.alarms()
        listed = element("ul", [element("li", line) for line in lines[:20]]) if lines else " no alarm"
        more = element("p", f"and {len(lines) - 20} more") if len(lines) > 20 else None
        items.append(element("li", element("strong", view.name), listed, more, data_member=member([view])))
    if not items:
        return None
    return element("details", element("summary", "Alarms of the monitor"), element("ul", items, class_="alarms"))


def skips(drawn: set[str]) -> Markup | None:
    shown = figures(SKIPS, drawn)
    if shown is None:
        return None
    more = None
    if "ratios" in drawn:
        summary = element("summary", "The ratios over training")
        more = element("details", summary, figure(*RATIOS, wide=True), class_="print")
    lead = "How strongly each long skip is scaled, and how large it is beside the backbone."
    return section("skips", "Long skips", lead, shown, more)


def samples(views: Sequence[RunView], frames: Sequence[Sequence[Frame]]) -> Markup | None:
    """The sample grids of all runs at one step, with a slider over the steps."""
    steps = sorted({frame.step for own in frames for frame in own})
    if not steps:
        return None
    grids = []
    for view, own in zip(views, frames, strict=True):
        images = [
            element("img", src=frame.address, alt=f"Samples of {view.name} at step {frame.step}", width=frame.width,
                    height=frame.height, data_step=frame.step, class_="pixelated" if frame.pixelated else None,
                    hidden=frame is not own[-1])
            for frame in own
        ]  # fmt: skip
        seed = "" if view.seed is None or len({other.seed for other in views}) < 2 else f" · seed {view.seed}"
        title = element("figcaption", element("span", data_swatch=view.index), " ", view.label, seed)
        if images:
            grids.append(element("figure", title, images, class_="samples", data_member=member([view])))
    slider = None
    if len(steps) > 1:
        last = len(steps) - 1
        handle = element("input", type="range", id="frame", min="0", max=last, step="1", value=last,
                         data_steps=json.dumps(steps))  # fmt: skip
        output = element("output", f"step {steps[-1]:,}", id="frame-step")
        slider = element("p", element("label", "From first to last ", handle), " ", output, class_="slider")
    lead = "From the EMA network, and from the same noise in every run."
    return section("samples", "Samples", lead, slider, element("div", grids, class_="grids"))


def robustness(drawn: set[str], views: Sequence[RunView]) -> Markup | None:
    shown = figures(ROBUSTNESS, drawn)
    if shown is None:
        return None
    lead = "Gaussian noise δ of variance σ_δ² is added to the network's input (the paper's Fig. 3c)."
    metrics = dict.fromkeys(str(m) for view in views if (m := (view.run.robustness or {}).get("metric")))
    if metrics:
        lead += f" Distance: {'; '.join(metrics)}."
    return section("robustness", "Robustness", lead, shown)


def evaluation(views: Sequence[RunView]) -> Markup | None:
    """Every stored evaluation with its card, side by side; fields that differ are marked."""
    columns, values = [], []
    for view in views:
        for stored in view.run.evaluations.values():
            columns.append((view.name, [view]))
            values.append(stored)
    if not columns:
        return None
    cards = [stored["card"] for stored in values]
    rows: list[tuple[Child, list[Child], bool]] = [_row("metric", [_cell(card.get("metric")) for card in cards])]
    for title, key in (("distance", "frechet"), ("KID", "kid")):
        texts = [_interval(stored.get(key), stored.get(f"{key}_interval")) for stored in values]
        if key == "frechet" or any(text != "–" for text in texts):
            rows.append((title, [element("strong", text) for text in texts], False))
    for title, path in CARD.items():
        texts = [_cell(_at(card, path)) for card in cards]
        if title in ("weights", "measured"):  # the start of a hash; a date without seconds and time zone
            texts = [text[:12] if title == "weights" else text[:16].replace("T", " ") for text in texts]
        if any(text != "–" for text in texts):
            rows.append(_row(title, texts))
    lines = [str(note) for card in cards if isinstance(card.get("notes"), list) for note in card["notes"]]
    lead = "Two distances compare only if their cards agree. Fields that differ are marked."
    return section(
        "evaluation", "Evaluation cards", lead, table(columns, rows, "Evaluation cards"), notes([*dict.fromkeys(lines)])
    )


def configs(views: Sequence[RunView]) -> Markup | None:
    """The settings that differ between the runs, then all settings of each."""
    known = [view for view in views if view.run.settings]
    if not known:
        return None
    settings = [view.run.settings for view in known]
    keys = differing_keys(settings)
    rows: list[tuple[Child, list[Child], bool]] = [
        (key, [_cell(own.get(key)) for own in settings], False) for key in keys
    ]
    records = [view.run.record for view in known]
    rows.append(("steps done", [_cell(view.run.logged_step) for view in known], False))
    rows.append(
        ("parameters", [f"{n:,}" if isinstance(n := r.get("parameters"), int) else "–" for r in records], False)
    )
    rows.append(("device", [_cell(record.get("device")) for record in records], False))
    for name in ("torch", "scalelong"):
        rows.append((name, [_cell(_at(record, ("versions", name))) for record in records], False))
    complete = [
        element(
            "details",
            element("summary", f"All settings of {view.name}"),
            element("table", element("tbody", [
                element("tr", element("th", key, scope="row"), element("td", _cell(value)))
                for key, value in view.run.settings.items()
            ])),
            data_member=member([view]),
        )
        for view in known
    ]  # fmt: skip
    lead = "These settings differ between the runs; all others are equal." if keys else "All settings are equal."
    if len(known) == 1:
        lead = "The settings of this run."
    columns = [(view.name, [view]) for view in known]
    return section("configs", "Configs", lead, table(columns, rows, "Settings that differ", "setting"), complete)


def _row(title: str, texts: Sequence[str]) -> tuple[Child, list[Child], bool]:
    return title, list(texts), len(set(texts)) > 1 and title != "measured"


def _interval(value: Any, interval: Any) -> str:
    if not isinstance(value, (int, float)):
        return "–"
    low, high = (interval.get("low"), interval.get("high")) if isinstance(interval, dict) else (None, None)
    known = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return with_interval(value, low, high) if known else number(value)


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_cell, value))
    text = str(value)
    return text if len(text) <= 200 else text[:199] + "…"


def footer(lines: Sequence[str]) -> Markup:
    return element("footer", [element("p", line) for line in lines])
