"""What all figures share: colours that people with any colour vision tell apart (Okabe and Ito's), and writing PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.report import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scalelong.paper.item import Item

_KINDS = {
    "none": "#000000",
    "uniform": "#E69F00",
    "cs-reverse": "#D55E00",
    "cs": "#0072B2",
    "ls": "#009E73",
    "stable": "#CC79A7",
    "rezero": "#56B4E9",
}
EXTRA = ("#CC79A7", "#56B4E9", "#009E73", "#D55E00", "#999999", "#0072B2")


def colour(variant: str) -> str:
    """One colour a kind of scaling, the same in every figure."""
    if variant in _KINDS:
        return _KINDS[variant]
    kind = next((name for name in _KINDS if variant.startswith(f"{name}-")), None)
    return EXTRA[0] if kind is None else _KINDS[kind]


def log_scale(ax: Axes) -> None:
    """A logarithmic vertical axis with plain numbers at 1, 2, 3 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def save_figure(item: Item, data: dict[str, Any], path: Path) -> None:
    """Draw an item's figure from its data and write a PNG, whole or not at all."""
    figure = figures.new_figure(*item.size)
    item.draw(data, figure)
    figures.save_figure(figure, path, dpi=120)
