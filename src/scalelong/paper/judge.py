"""Claims of the paper, the rule that judges them, and the tables beside them. page.md states the rule in full."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scalelong.experiments.statistics import Estimate, change, mean_interval, plus_minus
from scalelong.paper.drawing import label
from scalelong.paper.study import Trained

AGREES = "agrees"
OPEN = "open"
DISAGREES = "disagrees"
NO_VERDICT = "no verdict"
VERDICTS = (AGREES, OPEN, DISAGREES, NO_VERDICT)


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


LESS = below(1.0)  # of a ratio


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the quantity that tests it, the predicted region, and the measurement."""

    text: str
    quantity: str
    region: Region
    estimate: Estimate | None
    paper: str = ""  # the paper's figure for the quantity
    bound: str = ""  # in words, if `estimate` is of bounds: it decides the verdict, but is not a measurement

    @property
    def verdict(self) -> str:
        """Agreement or disagreement only if the whole interval is on one side of the region's edge."""
        estimate, region = self.estimate, self.region
        if estimate is None or estimate.low is None or estimate.high is None:
            return NO_VERDICT
        if region.low < estimate.low and estimate.high < region.high:
            return AGREES
        return DISAGREES if estimate.high <= region.low or estimate.low >= region.high else OPEN

    def to_dict(self) -> dict[str, Any]:
        ends = [None if math.isinf(end) else end for end in (self.region.low, self.region.high)]
        return {
            "claim": self.text, "quantity": self.quantity, "predicted": str(self.region), "region": ends,
            "measured": None if self.estimate is None else asdict(self.estimate),
            "paper": self.paper, "verdict": self.verdict, "bound": self.bound,
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

    def claim(
        self, trained: Trained, text: str, quantity: str, region: Region, estimate: Estimate | None, paper: str = "",
        bound: str = "",
    ) -> None:  # fmt: skip
        """Add a claim about the runs of a study."""
        self.claims.append(Claim(f"{trained.title}: {text}", quantity, region, estimate, paper, bound))

    def claim_ratios(
        self, trained: Trained, key: str, what: str, pairs: Sequence[tuple[str, str]], *, verb: str = "lowers",
        region: Region = LESS, paper: Mapping[tuple[str, str], str] | None = None, valid: bool = True,
    ) -> None:  # fmt: skip
        """Claim for each (variant, baseline) of the study that the ratio of a measure lies in the region.

        A measure that is not `valid` gets no verdict.
        """
        for kind, base in pairs:
            variant, baseline = trained.named(kind), trained.named(base)
            if variant is not None and baseline is not None:
                text = f"{label(variant)} {verb} the {what} against {label(baseline)}"
                quantity = f"{what}, {label(variant)} / {label(baseline)}"
                ratio = trained.ratio(variant, baseline, key) if valid else None
                self.claim(trained, text, quantity, region, ratio, (paper or {}).get((kind, base), ""))


def mean(values: Iterable[float]) -> Estimate | None:
    """Return the mean of values with its interval; None without values."""
    values = list(values)
    return mean_interval(values) if values else None


def cell(values: Iterable[float]) -> str:
    """Format the mean of values for a table."""
    estimate = mean(values)
    return "–" if estimate is None else plus_minus(estimate)


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
            text = cell(trained.values(variant, key).values())
            cells.append(text + (f" ({change(ratio)})" if ratio is not None else ""))
        if printed:
            kind = next((kind for kind in printed if trained.named(kind) == variant), None)
            cells.append(f"FID {printed[kind]}" if kind else "–")
        rows.append(cells)
    columns = ["variant", *(title for _, title in measures), *(["the paper's"] if printed else [])]
    study = trained.study
    return Table(f"{study.label}: {study.steps:,} steps, {len(study.seeds)} seeds", columns, rows)
