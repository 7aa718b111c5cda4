"""All sections in order, one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scalelong.bench import sections
from scalelong.bench.figures import Figure, machine
from scalelong.bench.growth import Growth, measure_growth
from scalelong.bench.processes import processes

from scalelong.errors import unknown
from scalelong.progress import track

SECTIONS: dict[str, Callable[[int], list[Figure]]] = {
    "digits": lambda rounds: sections.step("digits", rounds),
    "cifar10-tiny": lambda rounds: sections.step("cifar10-tiny", max(2, rounds // 3)),
    "limit": lambda rounds: sections.limit(rounds),
    "update": lambda rounds: sections.update(max(2, rounds // 2)),
    "unet": lambda rounds: sections.unet(max(2, rounds // 2)),
    "sampling": lambda rounds: sections.sampling(rounds),
    "compiled": lambda rounds: sections.compiled(rounds),
    "processes": lambda rounds: processes(max(2, rounds // 5)),
    "memory": lambda rounds: sections.memory(),
    "first": lambda rounds: sections.first_step(),
}


@dataclass(frozen=True)
class BenchReport:
    """Figures of the sections that ran, how costs grow where asked, and what machine it was."""

    rounds: int
    figures: list[Figure]
    growth: list[Growth] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "machine": machine(),
            "figures": [figure.to_dict() for figure in self.figures],
            "growth": [growth.to_dict() for growth in self.growth],
        }


def bench(names: list[str] | None = None, rounds: int = 15, growth: bool = False) -> BenchReport:
    """Run sections by name (all without names), each with `rounds` rounds or a fraction where a round is long."""
    chosen = list(SECTIONS) if names is None else names
    for name in chosen:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    figures = [figure for name in track(chosen, "bench") for figure in SECTIONS[name](rounds)]
    return BenchReport(rounds, figures, measure_growth(max(2, rounds // 3)) if growth else [])


def joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The newer report, with the sections that only the older one has, where both are of one machine."""
    if before.get("machine") != now["machine"]:
        return now
    again = {figure["section"] for figure in now["figures"]}
    kept = [figure for figure in before["figures"] if figure["section"] in SECTIONS and figure["section"] not in again]
    order = {name: k for k, name in enumerate(SECTIONS)}
    figures = sorted(kept + now["figures"], key=lambda figure: order[figure["section"]])
    return {**now, "figures": figures, "growth": now["growth"] or before["growth"]}
