"""What the figures share: colors that remain distinct under color blindness (Okabe and Ito), and a log axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
GRAY = "#999999"


def color(variant: str) -> str:
    """Return the color of a kind of scaling, the same in every figure."""
    kind = next((name for name in _KINDS if variant == name or variant.startswith(f"{name}-")), None)
    return EXTRA[0] if kind is None else _KINDS[kind]


def log_scale(ax: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers at 1, 2, 3 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
