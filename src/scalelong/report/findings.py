"""What the runs show, in sentences computed from their figures: no more than the intervals carry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalelong.experiments.comparison import Comparison, Row
from scalelong.experiments.measures import CURVES
from scalelong.experiments.statistics import Estimate
from scalelong.experiments.table import change, plus_minus

EVEN = 0.02  # of one seed: losses nearer together than this are called even
WORDS = {"none": "no scaling", "uniform": "uniform scaling", "ls": "LS"}


@dataclass(frozen=True)
class Findings:
    """A headline, what stands below it, and the reservation that goes with both."""

    headline: str
    details: tuple[str, ...] = ()
    caveat: str = ""


def findings(comparison: Comparison | None, labels: Sequence[str], steps: int, data: str) -> Findings:
    """The headline of a page. Without figures to compare it says what is shown and no more."""
    if comparison is None or not any(row.means for row in comparison.rows):
        what = said(labels[0]) if len(labels) == 1 else f"{len(labels)} runs"
        return Findings(f"{_capital(what)} on {data}, {steps:,} steps")
    others = [row for row in comparison.rows if row.variant != comparison.baseline and row.means]
    if not others:
        return _alone(comparison, data)
    seeds = max((ratio.n for row in others for ratio in row.ratios.values()), default=1)
    base = said(comparison.baseline)
    losses = _ratios(others, comparison.loss)
    lines = (
        _losses(losses, base, comparison.loss),
        _calmest(others, base),
        _soonest(others, base, comparison.loss),
        _nearest(others, base),
    )
    headline = _headline(losses, base, seeds) or f"{_listed([said(row.variant) for row in others])} beside {base}"
    return Findings(_capital(headline), tuple(line for line in lines if line), _caveat(seeds, comparison.steps, data))


def said(label: str) -> str:
    """A variant in words: cs-0.7 is CS (κ = 0.7)."""
    cs = re.fullmatch(r"cs(-reverse)?-([0-9.e-]+)", label)
    if cs:
        return f"{'reversed ' if cs[1] else ''}CS (κ = {cs[2]})"
    return WORDS.get(label, label)


def _alone(comparison: Comparison, data: str) -> Findings:
    row = next(row for row in comparison.rows if row.means)
    loss = row.means.get(comparison.loss)
    figure = "" if loss is None else f": validation loss {plus_minus(loss)}"
    return Findings(f"{_capital(said(row.variant))} on {data} after {comparison.steps:,} steps{figure}")


def _headline(losses: Mapping[str, Estimate], base: str, seeds: int) -> str | None:
    if not losses:
        return None
    best, worst = min(losses, key=lambda n: losses[n].mean), max(losses, key=lambda n: losses[n].mean)
    if seeds < 2:
        apart = max(1.0, losses[worst].mean) / min(1.0, losses[best].mean) - 1
        if apart < EVEN:
            return f"validation losses end within {_share(apart)} of each other"
        name = best if losses[best].mean < 1 else worst
        return f"{said(name)} ends {_by(losses[name].mean)} {base} in validation loss"
    better = {name: ratio for name, ratio in losses.items() if ratio.high is not None and ratio.high < 1}
    worse = [said(name) for name, ratio in losses.items() if ratio.low is not None and ratio.low > 1]
    if better:
        name = min(better, key=lambda n: better[n].mean)
        return f"{said(name)} ends {_by(better[name].mean)} {base} in validation loss"
    if worse:
        return f"{_listed(worse)} {'ends' if len(worse) == 1 else 'end'} above {base} in validation loss"
    return f"no clear difference in validation loss from {base}"


def _losses(losses: Mapping[str, Estimate], base: str, key: str) -> str | None:
    if not losses:
        return None
    listed = "; ".join(f"{said(name)} {change(ratio)}" for name, ratio in losses.items())
    return f"{_capital(CURVES[key])} against {base}: {listed}."


def _calmest(others: Sequence[Row], base: str) -> str | None:
    """The greatest fall of the feature oscillation, or that there is none."""
    found = _ratios(others, "feature_oscillation")
    if not found:
        return None
    name = min(found, key=lambda n: found[n].mean)
    if found[name].mean >= 1:
        return f"Features oscillate less with {base} than with any of the others."
    doubt = "" if _clear(found[name]) else "; the interval includes no change"
    return f"Features oscillate least with {said(name)}: {change(found[name])} against {base}{doubt}."


def _soonest(others: Sequence[Row], base: str, key: str) -> str | None:
    timed = {row.variant: row.sooner[key] for row in others if key in row.sooner}
    factors = {name: found.factor for name, found in timed.items() if found.factor is not None}
    late = [said(name) for name, found in timed.items() if found.factor is None]
    parts = []
    if factors:
        name = max(factors, key=lambda n: factors[n].mean)
        factor = factors[name]
        interval = "" if factor.low is None else f" [{factor.low:.2f}, {factor.high:.2f}]"
        how = "in as many steps" if abs(factor.mean - 1) < 0.02 else f"{factor.mean:.2f} times as soon"
        parts.append(f"{_capital(said(name))} gets to the final validation loss of {base} {how}{interval}")
    if late:
        there = "get there" if factors else f"get to the final validation loss of {base}"
        parts.append(f"{_listed(late)} {'does' if len(late) == 1 else 'do'} not {there} in every seed")
    return _capital("; ".join(parts)) + "." if parts else None


def _nearest(others: Sequence[Row], base: str) -> str | None:
    found = _ratios(others, "frechet")
    if not found:
        return None
    name = min(found, key=lambda n: found[n].mean)
    if found[name].mean >= 1:
        return f"By the Fréchet distance no samples are nearer to the data than those of {base}."
    doubt = "" if _clear(found[name]) else "; the interval includes no change"
    return f"By the Fréchet distance samples are nearest to the data with {said(name)}: {change(found[name])}{doubt}."


def _caveat(seeds: int, steps: int, data: str) -> str:
    if seeds < 2:
        return f"One seed, {steps:,} steps on {data}: there is no interval, and differences of this size may be chance."
    return f"{seeds} seeds, {steps:,} steps on {data}; paired by seed, 95 % intervals, not corrected for their number."


def _ratios(others: Sequence[Row], key: str) -> Mapping[str, Estimate]:
    return {row.variant: row.ratios[key] for row in others if key in row.ratios}


def _by(ratio: float) -> str:
    """3.1 % below, or 2.2 % above."""
    return f"{_share(abs(ratio - 1))} {'below' if ratio < 1 else 'above'}"


def _share(value: float) -> str:
    return f"{float(f'{value * 100:.2g}'):g} %"


def _clear(ratio: Estimate) -> bool:
    if ratio.low is None or ratio.high is None:
        return True  # one seed: the caveat says what that is worth
    return ratio.high < 1 or ratio.low > 1


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
