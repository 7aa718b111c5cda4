"""Claims and tables that several items make alike: ratios of a measure between two variants, means over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from scalelong.experiments.statistics import Estimate
from scalelong.experiments.table import change, plus_minus
from scalelong.paper.item import Table
from scalelong.paper.trained import Trained
from scalelong.paper.verdict import Claim, Region, below

LABELS = {"none": "no scaling", "uniform": "1/√2", "cs": "CS", "cs-reverse": "CS reversed", "ls": "LS"}


def label(variant: str) -> str:
    """none → no scaling, cs-0.7 → CS 0.7, ls-reduction-4 → LS, reduction 4."""
    if variant in LABELS:
        return LABELS[variant]
    for kind in ("cs-reverse", "cs", "uniform", "stable"):
        if variant.startswith(f"{kind}-"):
            number = variant.removeprefix(f"{kind}-")
            return {"uniform": f"κ_i = {number}", "stable": f"stable τ = {number}"}.get(
                kind, f"{LABELS.get(kind)} {number}"
            )
    if variant.startswith("ls-"):
        return "LS, " + variant.removeprefix("ls-").replace("-", " ")
    return {"rezero": "ReZero"}.get(variant, variant)


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
    """A claim for each (variant, baseline) that the study has: the ratio of a measure lies in the region.

    A measure that is not `valid` here gives no verdict.
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


def where(trained: Trained) -> str:
    """`batch 4: ` where the study says what sets it apart."""
    return f"{trained.study.label}: " if trained.study.label else ""


def means_table(
    trained: Trained, measures: Sequence[tuple[str, str]], baseline: str, paper: dict[str, str] | None = None
) -> Table:
    """Variants down; a mean ± half its interval and the paired change against the baseline for every measure."""
    columns = ["variant", *(title for _, title in measures)]
    columns += ["the paper's"] if paper else []
    rows = []
    base = trained.named(baseline)
    for variant in trained.variants:
        cells = [label(variant)]
        for key, _ in measures:
            ratio = None if base is None or variant == base else trained.ratio(variant, base, key)
            cells.append(cell(trained.mean(variant, key)) + (f" ({change(ratio)})" if ratio is not None else ""))
        kind = next((k for k in (paper or {}) if trained.named(k) == variant), None)
        rows.append((*cells, *([paper[kind] if kind else "–"] if paper else [])))
    title = f"{trained.title}: {trained.steps:,} steps, {len(trained.seeds)} seeds"
    return Table(title, tuple(columns), tuple(rows))


def cell(estimate: Estimate | None) -> str:
    return "–" if estimate is None else plus_minus(estimate)
