"""How variants are named and drawn: labels, colors that remain distinct under color blindness, and a log axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = {  # name, name before a parameter, color (Okabe and Ito)
    "none": ("no scaling", "", "#000000"),
    "uniform": ("1/√2", "κ_i = ", "#E69F00"),
    "cs-reverse": ("CS reversed", "CS reversed ", "#D55E00"),
    "cs": ("CS", "CS ", "#0072B2"),
    "ls": ("LS", "LS, ", "#009E73"),
    "stable": ("stable", "stable τ = ", "#CC79A7"),
    "rezero": ("ReZero", "", "#56B4E9"),
}
SERIES = ("#000000", "#CC79A7", "#56B4E9", "#009E73", "#D55E00", "#999999", "#0072B2")
GRAY = "#999999"


def _kind(variant: str) -> str:
    return next(kind for kind in _KINDS if variant == kind or variant.startswith(f"{kind}-"))


def color(variant: str) -> str:
    """Return the color of a kind of scaling, the same in every figure."""
    return _KINDS[_kind(variant)][2]


def label(variant: str) -> str:
    """Name a variant for people: none → no scaling, cs-0.7 → CS 0.7, ls-reduction-4 → LS, reduction 4."""
    kind = _kind(variant)
    name, prefix, _ = _KINDS[kind]
    return name if variant == kind else prefix + variant.removeprefix(f"{kind}-").replace("-", " ")


def log_scale(ax: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers at 1, 2, 3 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
