"""A comparison as a table for a terminal: measures down, variants across."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelong.experiments.acceleration import Acceleration
from scalelong.experiments.comparison import Comparison
from scalelong.experiments.statistics import Estimate, statement

if TYPE_CHECKING:
    from rich.console import Console


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table, what its figures are, and what is missing."""
    from rich.table import Table

    seeds = "1 seed" if len(comparison.seeds) == 1 else f"{len(comparison.seeds)} seeds"
    table = Table(
        title=f"{comparison.preset}: {comparison.steps} steps, {seeds}", title_justify="left", show_lines=True
    )
    table.add_column("")
    for row in comparison.rows:
        table.add_column(row.variant + (" (baseline)" if row.variant == comparison.baseline else ""), justify="right")
    for measure in comparison.measures():
        table.add_row(
            measure.title,
            *(_cell(row.means.get(measure.key), row.ratios.get(measure.key)) for row in comparison.rows),
        )
    for key, title in comparison.curves().items():
        table.add_row(
            f"sooner at the baseline's\nfinal {title}", *(_sooner(row.sooner.get(key)) for row in comparison.rows)
        )
    console.print(table)
    for line in (statement(len(comparison.seeds)), *comparison.notes):
        console.print(f"• {line}", highlight=False, markup=False)
    for line in comparison.missing:
        console.print(f"missing: {line}", style="red", highlight=False, markup=False)


def change(ratio: Estimate) -> str:
    """A ratio as a change: −2.1 % [−3.0, −1.2]; one that is far from 1 as a factor: ×0.31 [0.24, 0.4]."""
    ends = [end for end in (ratio.low, ratio.high) if end is not None]
    far = not 0.5 < ratio.mean < 2 or any(not 0.25 < end < 4 for end in ends)
    interval = f" [{', '.join(_factor(end) if far else _percent(end) for end in ends)}]" if ends else ""
    return f"×{_factor(ratio.mean)}{interval}" if far else f"{_percent(ratio.mean)} %{interval}"


def _factor(ratio: float) -> str:
    return f"{ratio:.3g}"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f}".replace("-", "−")


def plus_minus(estimate: Estimate) -> str:
    """0.4321 ± 0.0012, with as many places as the uncertainty has meaning."""
    if estimate.low is None or estimate.high is None:
        return figure(estimate.mean)
    half = (estimate.high - estimate.low) / 2
    return f"{figure(estimate.mean)} ± {half:,.0f}" if half >= 100 else f"{figure(estimate.mean)} ± {half:.2g}"


def figure(value: float) -> str:
    """Four figures; whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sooner(found: Acceleration | dict[str, Any]) -> str:
    """1.31× [1.10, 1.55], or that it never got there."""
    facts = found.to_dict() if isinstance(found, Acceleration) else found
    factor = facts["factor"]
    if factor is None:
        return f"reached in {facts['reached']} of {facts['seeds']}"
    if factor["low"] is None:
        return f"{factor['mean']:.2f}×"
    return f"{factor['mean']:.2f}× [{factor['low']:.2f}, {factor['high']:.2f}]"


def _cell(mean: Estimate | None, ratio: Estimate | None) -> str:
    if mean is None:
        return "–"
    return plus_minus(mean) + (f"\n{_escaped(change(ratio))}" if ratio is not None else "")


def _sooner(found: Acceleration | None) -> str:
    return "" if found is None else _escaped(sooner(found))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
