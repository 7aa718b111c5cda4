"""Claims of the paper, the rule that judges them, and the tables beside them. page.md states the rule in full."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scalelong.experiments.statistics import Estimate, change, mean_interval, plus_minus
from scalelong.paper.study import Trained

AGREES = "agrees"
UNSEEN = "no difference seen at this size"
DISAGREES = "disagrees"
OPEN = "no verdict"
VERDICTS = (AGREES, UNSEEN, DISAGREES, OPEN)


@dataclass(frozen=True)
class Region:
    """An open interval: where the paper's statement puts a quantity."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"below {self.high:g}"
        return f"above {self.low:g}" if math.isinf(self.high) else f"between {self.low:g} and {self.high:g}"


def below(edge: float) -> Region:
    return Region(high=edge)


def above(edge: float) -> Region:
    return Region(low=edge)


def judge(estimate: Estimate | None, region: Region) -> str:
    """Return the verdict: agreement or disagreement only if the whole interval is on one side of the region's edge."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return OPEN
    if region.low < estimate.low and estimate.high < region.high:
        return AGREES
    if estimate.high <= region.low or estimate.low >= region.high:
        return DISAGREES
    return UNSEEN


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the quantity that tests it, the predicted region, and the measurement."""

    text: str
    quantity: str
    region: Region
    estimate: Estimate | None
    paper: str = ""  # the paper's figure for the quantity

    @property
    def verdict(self) -> str:
        return judge(self.estimate, self.region)

    def to_dict(self) -> dict[str, Any]:
        ends = [None if math.isinf(end) else end for end in (self.region.low, self.region.high)]
        return {
            "claim": self.text, "quantity": self.quantity, "predicted": str(self.region), "region": ends,
            "measured": None if self.estimate is None else self.estimate.to_dict(),
            "paper": self.paper, "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Outcome:
    """The result of an analysis, filled study by study. `data` is JSON-ready; the figure is drawn from it alone."""

    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=lambda: {"panels": []})

    @property
    def panels(self) -> list[dict[str, Any]]:
        panels: list[dict[str, Any]] = self.data["panels"]
        return panels

    def claim(
        self, trained: Trained, text: str, quantity: str, region: Region, estimate: Estimate | None, paper: str = ""
    ) -> None:
        """Add a claim about the runs of a study."""
        self.claims.append(Claim(where(trained) + text, quantity, region, estimate, paper))


LABELS = {"none": "no scaling", "uniform": "1/√2", "cs": "CS", "cs-reverse": "CS reversed", "ls": "LS"}
_PREFIXES = {"cs-reverse-": "CS reversed ", "cs-": "CS ", "uniform-": "κ_i = ", "stable-": "stable τ = "}


def label(variant: str) -> str:
    """Name a variant for people: none → no scaling, cs-0.7 → CS 0.7, ls-reduction-4 → LS, reduction 4."""
    if variant in LABELS:
        return LABELS[variant]
    for prefix, text in _PREFIXES.items():
        if variant.startswith(prefix):
            return text + variant.removeprefix(prefix)
    if variant.startswith("ls-"):
        return "LS, " + variant.removeprefix("ls-").replace("-", " ")
    return {"rezero": "ReZero"}.get(variant, variant)


def where(trained: Trained) -> str:
    """Return `batch 4: ` if the study has a label."""
    return f"{trained.study.label}: " if trained.study.label else ""


def mean(values: Sequence[float]) -> Estimate | None:
    return mean_interval(values) if values else None


def cell(estimate: Estimate | None) -> str:
    return "–" if estimate is None else plus_minus(estimate)


def ratio_claims(
    trained: Trained,
    key: str,
    what: str,
    pairs: Sequence[tuple[str, str]],
    *,
    region: Region | None = None,
    verb: str = "lowers",
    paper: dict[tuple[str, str], str] | None = None,
    valid: bool = True,
) -> list[Claim]:
    """Claim for each (variant, baseline) of the study that the ratio of a measure lies in the region (below 1).

    A measure that is not `valid` gets no verdict.
    """
    claims = []
    for kind, base in pairs:
        variant, baseline = trained.named(kind), trained.named(base)
        if variant is None or baseline is None:
            continue
        claims.append(
            Claim(
                f"{where(trained)}{label(variant)} {verb} the {what} against {label(baseline)}",
                f"{what}, {label(variant)} / {label(baseline)}",
                region or below(1.0),
                trained.ratio(variant, baseline, key) if valid else None,
                (paper or {}).get((kind, base), ""),
            )
        )
    return claims


def means_table(
    trained: Trained, measures: Sequence[tuple[str, str]], baseline: str, printed: Mapping[str, str] | None = None
) -> Table:
    """Tabulate variants by measures: mean ± half its interval, and the paired change against the baseline."""
    rows = []
    base = trained.named(baseline)
    for variant in trained.variants:
        cells = [label(variant)]
        for key, _ in measures:
            ratio = None if base is None or variant == base else trained.ratio(variant, base, key)
            cells.append(cell(trained.mean(variant, key)) + (f" ({change(ratio)})" if ratio is not None else ""))
        if printed:
            kind = next((kind for kind in printed if trained.named(kind) == variant), None)
            cells.append(f"FID {printed[kind]}" if kind else "–")
        rows.append(cells)
    columns = ["variant", *(title for _, title in measures), *(["the paper's"] if printed else [])]
    return Table(f"{trained.title}: {trained.steps:,} steps, {len(trained.seeds)} seeds", columns, rows)
