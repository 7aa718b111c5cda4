"""Evaluation cards and configs as tables: what was measured how, and what differs between the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scalelong.report.markup import Markup, element
from scalelong.report.read import RunView
from scalelong.report.sections import member, section

CARD_ROWS = {
    "N": ("card", "n"),
    "reference": ("card", "reference", "name"),
    "split": ("card", "reference", "split"),
    "N of the reference": ("card", "reference", "n"),
    "extractor": ("card", "extractor"),
    "weights": ("card", "weights"),
    "resize": ("card", "resize"),
    "sampler": ("card", "generation", "sampler"),
    "evaluations a sample": ("card", "generation", "evaluations"),
    "guidance": ("card", "generation", "guidance"),
    "EMA": ("card", "generation", "ema"),
    "sample seed": ("card", "generation", "sample_seed"),
    "step": ("card", "generation", "step"),
    "measured": ("card", "created"),
}


def evaluation(runs: Sequence[RunView]) -> Markup | None:
    """Every card of every run, the same fields side by side; what differs is marked."""
    cards = [(run, card) for run in runs for card in run.cards if isinstance(card.get("card"), dict)]
    if not cards:
        return None
    rows = [_row("metric", cards, [_words(card["card"].get("metric")) for _, card in cards])]
    rows.append(_row("distance", cards, [_with_interval(card, "frechet") for _, card in cards], strong=True))
    if any(card.get("kid") is not None for _, card in cards):
        rows.append(_row("KID", cards, [_with_interval(card, "kid") for _, card in cards], strong=True))
    for title, path in CARD_ROWS.items():
        values = [_short(title, _at(card, path)) for _, card in cards]
        if any(value != "–" for value in values):
            rows.append(_row(title, cards, values))
    head = [element("th", "", scope="col")]
    head += [element("th", run.name, scope="col", data_member=member([run])) for run, _ in cards]
    table = element("table", element("thead", element("tr", head)), element("tbody", rows))
    notes = dict.fromkeys(
        note for _, card in cards for note in _list(card["card"].get("notes"))
    )  # the same note of every run once
    return section(
        "evaluation",
        "Evaluation cards",
        "A distance means something beside another only if their cards agree. Fields that differ are marked.",
        element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Evaluation cards"),
        element("ul", [element("li", note) for note in notes], class_="notes") if notes else None,
    )


def configs(runs: Sequence[RunView]) -> Markup | None:
    """What differs between the configs, then each whole."""
    known = [run for run in runs if run.settings]
    if not known:
        return None
    keys = list(dict.fromkeys(key for run in known for key in run.settings))
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in known}) > 1]
    head = element("tr", element("th", "setting", scope="col"), _heads(known))
    rows = [
        element("tr", element("th", key, scope="row"),
                [element("td", _words(run.settings.get(key)), data_member=member([run])) for run in known])
        for key in differing
    ]  # fmt: skip
    facts = [
        element("tr", element("th", title, scope="row"),
                [element("td", _words(read(run)), data_member=member([run])) for run in known])
        for title, read in _FACTS.items()
    ]  # fmt: skip
    table = element("table", element("thead", head), element("tbody", rows, facts))
    wholes = [
        element(
            "details",
            element("summary", f"All settings of {run.name}"),
            element("table", element("tbody", [
                element("tr", element("th", key, scope="row"), element("td", _words(value)))
                for key, value in run.settings.items()
            ])),
            data_member=member([run]),
        )
        for run in known
    ]  # fmt: skip
    lead = (
        "These settings differ between the runs; all others are equal."
        if differing
        else "All settings are equal."
        if len(known) > 1
        else "What this run was made with."
    )
    return section(
        "configs",
        "Configs",
        lead,
        element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Settings that differ"),
        wholes,  # type: ignore[arg-type]
    )


_FACTS = {
    "steps done": lambda run: run.step,
    "parameters": lambda run: _number(run.record.get("parameters")),
    "device": lambda run: run.record.get("device"),
    "torch": lambda run: _at(run.record, ("versions", "torch")),
    "scalelong": lambda run: _at(run.record, ("versions", "scalelong")),
}


def _heads(runs: Sequence[RunView]) -> list[Markup]:
    return [element("th", run.name, scope="col", data_member=member([run])) for run in runs]


def _row(
    title: str, cards: Sequence[tuple[RunView, Mapping[str, Any]]], values: Sequence[str], strong: bool = False
) -> Markup:
    differs = len(set(values)) > 1 and not strong and title != "measured"
    cells = [
        element("td", element("strong", value) if strong else value, data_member=member([run]),
                class_="differs" if differs else None)
        for (run, _), value in zip(cards, values, strict=True)
    ]  # fmt: skip
    return element("tr", element("th", title, scope="row"), cells)


def _with_interval(card: Mapping[str, Any], name: str) -> str:
    value, around = card.get(name), card.get(f"{name}_interval")
    if not isinstance(value, (int, float)):
        return "–"
    low, high = (around.get("low"), around.get("high")) if isinstance(around, dict) else (None, None)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return f"{value:.4g} [{low:.4g}, {high:.4g}]"
    return f"{value:.4g}"


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _short(title: str, value: Any) -> str:
    """Hashes by their beginning, moments without their time zone."""
    cut = {"weights": 12, "measured": 16}.get(title)
    return _words(value) if cut is None else _words(value)[:cut].replace("T", " ")


def _words(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_words, value))
    said = str(value)
    return said if len(said) <= 200 else said[:199] + "…"


def _number(value: Any) -> str | None:
    return f"{value:,}" if isinstance(value, int) else None


def _list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []
