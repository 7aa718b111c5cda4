"""An item of the paper: a figure or a table, what it shows, what is trained for it in either size, how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from scalelong.paper.study import Study
from scalelong.paper.verdict import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scalelong.paper.trained import Trained

SIZES = ("cpu", "paper")


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What an analysis found. `data` is all that the figure is drawn from, JSON-ready."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    data: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One figure or table.

    shows      what the paper's shows, with its printed numbers where there are any
    cpu, paper what is trained for it in either size
    analyse    finished runs → outcome; `draw` (data, figure) paints it
    minutes    processor minutes of the analysis itself at CPU size
    differs    where the CPU-sized experiment is not the paper's, in words
    commands   of the paper's size, beyond training
    """

    name: str
    title: str
    shows: str
    analyse: Callable[[Sequence[Trained], str], Outcome]
    draw: Callable[[dict[str, Any], Figure], None]
    cpu: tuple[Study, ...] = ()
    paper: tuple[Study, ...] = ()
    differs: str = ""
    minutes: float = 0.0
    commands: tuple[str, ...] = ()
    size: tuple[float, float] = field(default=(10.0, 4.0))  # of the figure, inches

    def studies(self, size: str) -> tuple[Study, ...]:
        return self.cpu if size == "cpu" else self.paper
