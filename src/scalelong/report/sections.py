"""The parts of the page from top to bottom. Each returns its HTML, or None if the runs have no data for it."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from scalelong._text import with_interval
from scalelong.evaluation.evaluate import stored_metrics
from scalelong.experiments.comparison import PARTS, Comparison
from scalelong.experiments.statistics import change, difference, statistics_note
from scalelong.report.findings import Findings
from scalelong.report.markup import Child, Markup, element
from scalelong.report.pictures import Pictures, Sheet
from scalelong.report.read import RunView, differing_keys, labels, scaling_of
from scalelong.runs.config import flatten

# The charts of each section: name, title, caption.
CURVES = [
    ("relative", "Validation loss against {baseline}",
     "Change at the same step and seed; below the dashed line is better."),
    ("validation_ema", "Validation loss of the EMA", "The averaged network, which generates the samples."),
    ("validation", "Validation loss", "Held-out images with fixed noise and times, the same for every run."),
    ("loss", "Training loss", "On training batches; shaded: the range within a point of the curve."),
    ("gradient", "Gradient norm", "Of the whole gradient, before clipping."),
]  # fmt: skip
NORMS = [
    ("norm_by_skip", "Norm by join",
     "‖hᵢ‖ on training batches, mean over the last tenth of training; long skip i joins hᵢ. Outer and inner joins can "
     "go opposite ways."),
    ("growth", "Growth by join", "p of ‖hᵢ‖ ∝ step^p on training batches, fitted over the second half of training."),
    ("absolute_oscillation", "Absolute oscillation by join",
     "Root mean square of ‖hᵢ‖ around its smoothed curve, over the second half of training."),
]  # fmt: skip
OSCILLATION = [
    ("oscillation", "Relative oscillation by join",
     "Our own measure, not Fig. 1's. "
     "Standard deviation of the jumps of log‖hᵢ‖ over one step, on one fixed probe batch, in the second half of "
     "training. Long skip i joins hᵢ; the last is the middle block's output."),
    ("oscillation_train", "The same on training batches",
     "Here the sampled images and times also change from step to step, which is not the network's doing."),
    ("oscillation_gradient", "Relative oscillation of the gradient",
     "The same of the gradient norm, before clipping, in the block that consumes long skip i."),
]  # fmt: skip
NORM_CURVES = (
    "norms", "Norm against step",
    "The paper's Fig. 1: the norm of a feature on training batches, smoothed over a twentieth of the snapshots, with a "
    "band of one absolute oscillation over the same window. hᵢ is what long skip i joins; the paper does not say which "
    "layer it plots.",
)  # fmt: skip
POINTWISE = {
    "norm": "norm",
    "growth": "growth, difference",
    "absolute_oscillation": "absolute oscillation",
    "relative_oscillation": "relative oscillation (ours)",
}
TEXTS = {key: difference if key == "growth" else change for key in POINTWISE}
SKIPS = [
    ("kappa", "κᵢ by skip",
     "At the end of training. Shaded: κ^(i−1) for κ from 0.5 to 0.95, the range that Section 4.1 gives CS (Fig. 7). "
     "Bars: the range of learned coefficients over tokens or channels of the probe."),
    ("ratio", "Skip against backbone", "‖κᵢ·xᵢ‖/‖hᵢ‖ where long skip i joins, on the probe at the end of training."),
]  # fmt: skip
RATIOS = ("ratios", "Skip against backbone over training", "The same ratio at every snapshot.")
ROBUSTNESS = [
    ("robust_change", "Change of the prediction",
     "E‖F̂(x + δ) − F̂(x)‖²/m against σ_δ², on held-out images. F̂ is what the network predicts (ε̂ for noise prediction), "
     "x its input."),
    ("robust_loss", "Loss with extra noise", "The loss at x_t + δ against σ_δ²."),
    ("robust_distance", "Samples with extra noise",
     "Fréchet distance of samples when every network evaluation sees x + δ; bars: 95 % over the samples."),
    ("lipschitz", "Local Lipschitz constant", "‖∂F̂/∂x‖₂ at the middle of each timestep bin, a lower estimate."),
]  # fmt: skip
FOREST = "Ratio to the baseline's run of the same seed; left of the line is less."
SEEDS = " A tick is a seed, the mark their geometric mean, the bar its 95 % interval."
# The fields of an evaluation card: title and dotted key.
CARD = {
    "N": "n", "reference": "reference.name", "split": "reference.split", "N of the reference": "reference.n",
    "extractor": "extractor", "weights": "weights", "resize": "resize", "sampler": "generation.sampler",
    "objective": "generation.objective", "evaluations per sample": "generation.evaluations",
    "guidance": "generation.guidance", "EMA": "generation.ema",
    "clipped predictions": "generation.clip_denoised", "share out of range": "generation.far_share",
    "sample seed": "generation.sample_seed", "step": "generation.step", "measured": "created",
}  # fmt: skip
NO_WEIGHTS = ("none", hashlib.sha256().hexdigest())  # of older versions: the hash of no tensors

# ------------------------------------------------------------------------------------------------ building blocks


def member(views: Sequence[RunView]) -> str:
    """The runs that an element belongs to. The legend hides it together with them."""
    return " ".join(str(view.index) for view in views)


def section(identity: str, title: str, lead: str, *children: Child) -> Markup | None:
    """A section with its heading and a sentence or two on how to read it; None without content."""
    if not any(children):
        return None
    return element("section", element("h2", title), element("p", lead, class_="lead"), *children, id=identity)


def figure(drawn: Collection[str], chart: str, title: str, caption: str, wide: bool = False) -> Markup | None:
    """An empty element that the script draws a chart into, with title and caption; None if the chart has no data."""
    if chart not in drawn:
        return None
    canvas = element("div", class_="chart", data_chart=chart, aria_label=f"{title}. Arrow keys move the cursor.")
    caption = element("figcaption", caption)
    return element("figure", element("h3", title), canvas, caption, class_="wide" if wide else None)


def figures(
    drawn: Collection[str], catalogue: Sequence[tuple[str, str, str]], class_: str = "figures"
) -> Markup | None:
    """The charts of a section that have data."""
    shown = [figure(drawn, *entry) for entry in catalogue if entry[0] in drawn]
    return element("div", shown, class_=class_) if shown else None


class Row(NamedTuple):
    title: Child
    cells: Sequence[Child]
    marked: bool = False


def table(
    columns: Sequence[tuple[Child, Sequence[RunView]]], rows: Sequence[Row], label: str, corner: str = ""
) -> Markup:
    """A table that scrolls sideways. Each column has a heading and the runs that it belongs to."""
    head = [element("th", title, scope="col", data_member=member(views)) for title, views in columns]
    body = []
    for title, cells, marked in rows:
        row = [
            element("td", cell, data_member=member(views), class_="differs" if marked else None)
            for cell, (_, views) in zip(cells, columns, strict=True)
        ]
        body.append(element("tr", element("th", title, scope="row"), row))
    head_row = element("tr", element("th", corner, scope="col"), head)
    content = element("table", element("thead", head_row), element("tbody", body))
    scroll = element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)
    return element("div", scroll, element("p", "scroll sideways for more columns →", class_="hint"), class_="table")


def common(title: str, facts: Sequence[tuple[str, str]]) -> Markup | None:
    """Facts that all columns of a table share, in one paragraph."""
    listed = [[" · " if k else " ", element("strong", name), f" {value}"] for k, (name, value) in enumerate(facts)]
    return element("p", f"{title}:", listed, class_="common") if facts else None


def bullets(lines: Sequence[Child], class_: str | None = None) -> Markup | None:
    return element("ul", [element("li", line) for line in lines], class_=class_) if lines else None


# -------------------------------------------------------------------------------------------------------- sections


def headline(summary: Findings, facts: Sequence[str], unfinished: Mapping[str, str]) -> Markup:
    title, caveat, *details = (  # a percent sign stays on the line of its number
        line.replace(" %", "\u00a0%") for line in (summary.headline, summary.caveat, *summary.details)
    )
    return element(
        "header",
        element("p", " · ".join(facts), class_="over"),
        element("h1", title),
        bullets(details, "details"),
        element("p", caveat, class_="caveat") if caveat else None,
        [element("p", element("strong", name), f" {how}", class_="caveat failed") for name, how in unfinished.items()],
    )


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


def results(comparison: Comparison | None, views: Sequence[RunView], drawn: Collection[str]) -> Markup | None:
    """The table of means and paired ratios, and the chart of the ratios."""
    if comparison is None or not comparison.measures():
        return None
    columns: list[tuple[Child, list[RunView]]] = []
    for variant in comparison.variants:
        own = [view for view in views if view.label == variant]
        swatch = element("span", data_swatch=own[0].index) if own else None
        several = len(comparison.variants) > 1
        note = element("small", "baseline") if variant == comparison.baseline and several else None
        columns.append(([swatch, " ", variant, " ", note], own))
    rows = []
    for title, meaning, texts in comparison.table():
        cells = [
            [element("span", mean, class_="mean"), element("small", change) if change else None]
            for mean, change in texts
        ]
        rows.append(Row([title, element("small", meaning)], cells))
    several = len(comparison.seeds) > 1
    lead = "At the end of training" + (", with changes against the baseline." if len(columns) > 1 else ".")
    return section(
        "results",
        "Results",
        statistics_note(len(comparison.seeds)) if several else lead,
        figure(drawn, "forest", f"Against {comparison.baseline}", FOREST + SEEDS * several, wide=True),
        table(columns, rows, "Results"),
        bullets(comparison.notes, "notes"),
    )


def curves(
    drawn: Collection[str], only_scaling_differs: bool, baseline: str, metrics: Mapping[str, str]
) -> Markup | None:
    lead = "Means over the points of a curve; the bar above smooths and switches to a logarithmic axis."
    if only_scaling_differs:
        lead = "Runs of one seed see the same images, times and noise in the same order; only their scaling differs."
    catalogue = [(name, title.format(baseline=baseline), caption) for name, title, caption in CURVES]
    measured = [(f"metric {name}", label, "Of samples from the EMA network, measured during training.")
                for name, label in metrics.items()]  # fmt: skip
    catalogue[3:3] = measured
    return section("curves", "Training", lead, figures(drawn, catalogue))


def norms(drawn: Collection[str], views: Sequence[RunView], comparison: Comparison | None) -> Markup | None:
    lead = (
        "Three quantities: the norm of a feature, which grows during training; its absolute oscillation, the band "
        "around that curve; and its relative oscillation, how much the logarithm of the norm jumps in one step (i = 1 "
        "is the outermost join)."
    )
    curves, by_join = figure(drawn, *NORM_CURVES, wide=True), figures(drawn, NORMS, "figures three")
    relative = figures(drawn, OSCILLATION, "figures three")
    listed = None if comparison is None else _pointwise(comparison, views)
    return section("oscillations", "Norms and oscillations", lead, curves, by_join, relative, listed, _alarms(views))


def _pointwise(comparison: Comparison, views: Sequence[RunView]) -> Markup | None:
    """Norm, growth and oscillations of every join and block against the baseline, one table per variant."""
    blocks: list[str] = next((run.norms["blocks_names"] for run in comparison.runs if run.norms), [])
    found = {(part, key): comparison.pointwise(part, key) for part in PARTS for key in POINTWISE}
    tables = []
    for variant in comparison.variants[1:]:
        rows = []
        for part in PARTS:
            own = [found[part, key].get(variant, []) for key in POINTWISE]
            for k, estimates in enumerate(zip_longest(*own)):
                texts = ["–" if e is None else TEXTS[key](e) for key, e in zip(POINTWISE, estimates, strict=True)]
                rows.append(Row(f"‖h_{k + 1}‖" if part == "backbone" else blocks[k], texts))
        members = [view for view in views if view.label == variant]
        columns = [(title, members) for title in POINTWISE.values()]
        tables += [table(columns, rows, f"{variant} against {comparison.baseline}", variant)] if rows else []
    summary = element("summary", f"Every join and block against {comparison.baseline}")
    return element("details", summary, tables, class_="print") if tables else None


def _alarms(views: Sequence[RunView]) -> Markup | None:
    items = []
    for view in views:
        if view.run.stability is None:
            continue
        lines = view.run.stability.alarms()
        more = element("p", f"and {len(lines) - 20} more") if len(lines) > 20 else None
        listed = bullets(lines[:20]) or " no alarm"
        items.append(element("li", element("strong", view.name), listed, more, data_member=member([view])))
    if not items:
        return None
    return element("details", element("summary", "Alarms of the monitor"), element("ul", items, class_="alarms"))


def skips(drawn: Collection[str]) -> Markup | None:
    lead = "How strongly each long skip is scaled, and how large it is beside the backbone."
    ratios = figure(drawn, *RATIOS, wide=True)
    summary = element("summary", "The ratios over training")
    more = element("details", summary, ratios, class_="print") if ratios else None
    return section("skips", "Long skips", lead, figures(drawn, SKIPS), more)


def samples(views: Sequence[RunView], pictures: Pictures) -> Markup | None:
    """Real images and the sample grids of all runs at one step, with a slider over the steps."""
    steps = sorted({sheet.step for own in pictures.samples for sheet in own})
    if not steps:
        return None
    several_seeds = len({view.seed for view in views}) > 1
    first = [_sheets(["Real images"], [views[k] for k in own], [sheet], "real images") for sheet, own in pictures.real]
    more, shown = list[Markup](), set[str]()
    for view, own in zip(views, pictures.samples, strict=True):
        seed = f" · seed {view.seed}" if several_seeds and view.seed is not None else ""
        title = [element("span", data_swatch=view.index), " ", view.label, seed]
        if own:
            (more if view.label in shown else first).append(_sheets(title, [view], own, f"samples of {view.name}"))
            shown.add(view.label)
    slider = None
    if len(steps) > 1:
        end = len(steps) - 1
        handle = element("input", type="range", id="frame", min="0", max=end, step="1", value=end,
                         data_steps=json.dumps(steps))  # fmt: skip
        output = element("output", f"step {steps[-1]:,}", id="frame-step")
        slider = element("p", element("label", "From first to last ", handle), " ", output, class_="slider")
    noise = ", and from the same noise in every run" if len(views) > 1 else ""
    lead = f"From the EMA network{noise}. Press a grid to enlarge it."
    last = [own[-1] for own in pictures.samples if own]
    wide = any(len(sheet.heads) > 8 for sheet in last)  # many columns with a name each
    kind = "grids wide" if wide else "grids captioned" if any(sheet.captions for sheet in last) else "grids"
    others = element("details", element("summary", "Samples of the other seeds"), element("div", more, class_=kind))
    zoom = element("dialog", element("p", "← → other grids · Esc closes", class_="hint"), element("div"), id="zoom",
                   aria_label="Enlarged samples")  # fmt: skip
    grids = element("div", first, class_=kind)
    return section("samples", "Samples", lead, slider, grids, others if more else None, zoom)


def _sheets(title: Child, views: Sequence[RunView], sheets: Sequence[Sheet], name: str) -> Markup:
    """The grids of one run at several steps, of which the last is shown, with captions below rows or above columns."""

    def captions(texts: Sequence[str]) -> Markup | None:
        cells = [element("span", text) for text in texts]
        return element("span", cells, class_="captions", style=f"--columns:{len(texts)}") if texts else None

    last = sheets[-1]
    parts = [captions(last.heads)]
    for k in range(len(last.strips)):
        images = [
            element("img", src=sheet.strips[k], alt=f"{name}, step {sheet.step}" if sheet.step else name,
                    width=sheet.width, height=sheet.height, data_step=sheet.step, hidden=sheet is not last)
            for sheet in sheets
            if k < len(sheet.strips)
        ]  # fmt: skip
        parts += [element("span", images, class_="strip"), captions(last.captions[k]) if last.captions else None]
    button = element(
        "button", parts, type="button", class_="sheet", aria_label=f"Enlarge {name}", data_columns=last.columns,
        data_captioned=bool(last.heads or last.captions),
    )  # fmt: skip
    return element("figure", element("figcaption", title), button, class_="samples", data_member=member(views))


def robustness(drawn: Collection[str], views: Sequence[RunView]) -> Markup | None:
    lead = "Gaussian noise δ of variance σ_δ² is added to the network's input (the paper's Fig. 3c)."
    metrics = dict.fromkeys(str(m) for view in views if (m := (view.run.robustness or {}).get("metric")))
    if metrics:
        lead += f" Distance: {'; '.join(metrics)}."
    return section("robustness", "Robustness", lead, figures(drawn, ROBUSTNESS))


def evaluation(views: Sequence[RunView]) -> Markup | None:
    """Every stored evaluation side by side: its metrics, and the fields of its card that differ."""
    columns = [(view.name, [view]) for view in views for _ in view.run.evaluations]
    stored = [evaluation for view in views for evaluation in view.run.evaluations.values()]
    if not stored:
        return None
    metrics = [{metric.label: metric for metric in stored_metrics(one)} for one in stored]
    rows = []
    for label in dict.fromkeys(label for own in metrics for label in own):
        found = [own.get(label) for own in metrics]
        texts = ["–" if m is None else with_interval(m.value, m.low, m.high) for m in found]
        rows.append(Row(label, [element("strong", text) for text in texts]))
    cards, equal = [flatten(one["card"]) for one in stored], []
    for title, key in CARD.items():
        texts = [_cell(card.get(key)) for card in cards]
        if title == "weights":
            texts = ["–" if text in NO_WEIGHTS else text[:12] for text in texts]  # the start of a hash
        if title == "measured":
            texts = [text[:16].replace("T", " ") for text in texts]  # without seconds and time zone
        if len(set(texts)) > 1:
            rows.append(Row(title, texts, title != "measured"))
        elif texts[0] != "–":
            equal.append((title, texts[0]))
    lines = dict.fromkeys(str(note) for card in cards if isinstance(card.get("notes"), tuple) for note in card["notes"])
    lead = "Two distances compare only if their cards agree. Fields that differ are marked."
    cards_table = table(columns, rows, "Evaluation cards")
    shared = common("The same in all" if len(stored) > 1 else "Card", equal)
    return section("evaluation", "Evaluation cards", lead, cards_table, shared, bullets(list(lines), "notes"))


def configs(views: Sequence[RunView]) -> Markup | None:
    """The settings that differ between the runs, then all settings of each."""
    known = [view for view in views if view.run.settings]
    if not known:
        return None
    keys = [key for key in differing_keys([view.run.settings for view in known]) if key != "scaling.kind"]
    facts: dict[str, list[str]] = {"scaling": [scaling_of(view.run) for view in known]}
    facts |= {key: [_cell(view.run.settings.get(key)) for view in known] for key in keys}
    facts["steps done"] = [f"{view.run.logged_step:,}" for view in known]
    records = [flatten(view.run.record) for view in known]
    facts["parameters"] = [f"{n:,}" if isinstance(n := record.get("parameters"), int) else "–" for record in records]
    for key in ("device", "versions.torch", "versions.scalelong"):
        facts[key.removeprefix("versions.")] = [_cell(record.get(key)) for record in records]
    rows = [Row(title, texts) for title, texts in facts.items() if len(set(texts)) > 1]
    equal = [(title, texts[0]) for title, texts in facts.items() if len(set(texts)) == 1 and texts[0] != "–"]
    complete = []
    for view in known:
        settings = [
            element("tr", element("th", key, scope="row"), element("td", _cell(value)))
            for key, value in view.run.settings.items()
        ]
        summary = element("summary", f"All settings of {view.name}")
        content = element("table", element("tbody", settings))
        complete.append(element("details", summary, content, data_member=member([view])))
    lead = "What differs between the runs; all other settings are equal." if rows else "All settings are equal."
    if len(known) == 1:
        lead = "The settings of this run."
    columns = [(view.name, [view]) for view in known]
    differing = table(columns, rows, "Settings that differ", "setting") if rows else None
    shared = common("The same in all runs" if len(known) > 1 else "This run", equal)
    return section("configs", "Configs", lead, differing, shared, complete)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_cell, value))
    text = str(value)
    return text if len(text) <= 200 else text[:199] + "…"
