"""What the runs show, in sentences computed from their figures: no more than the intervals carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scalelong.experiments.comparison import Comparison, Row
from scalelong.experiments.statistics import Estimate
from scalelong.experiments.table import change, figure, plus_minus

EVEN = 0.01  # of one seed: losses nearer than this are called even


@dataclass(frozen=True)
class Findings:
    """A headline, what stands below it, and the reservation that goes with both."""

    headline: str
    details: tuple[str, ...]
    caveat: str


def findings(comparison: Comparison | None, labels: Sequence[str], steps: int, data: str) -> Findings:
    """The headline of a page. Without figures to compare it says what is shown and no more."""
    if comparison is None or not any(row.means for row in comparison.rows):
        what = labels[0] if len(labels) == 1 else f"{len(labels)} runs"
        return Findings(f"{what} on {data}, {steps:,} steps", (), "")
    others = [row for row in comparison.rows if row.variant != comparison.baseline and row.means]
    if not others:
        return _alone(comparison, data)
    seeds = max((ratio.n for row in others for ratio in row.ratios.values()), default=1)
    headline = _loss_headline(others, comparison.baseline, seeds)
    details = [line for line in (_calmest(others, comparison.baseline), _soonest(others), _distance(others)) if line]
    return Findings(headline, tuple(details), _caveat(seeds, comparison.steps, data))


def _alone(comparison: Comparison, data: str) -> Findings:
    row = comparison.rows[0]
    loss = row.means.get("val_loss")
    said = "" if loss is None else f": validation loss {plus_minus(loss)}"
    return Findings(f"{row.variant} on {data} after {comparison.steps:,} steps{said}", (), "")


def _loss_headline(others: Sequence[Row], baseline: str, seeds: int) -> str:
    losses = {row.variant: row.ratios["val_loss"] for row in others if "val_loss" in row.ratios}
    if not losses:
        return f"{_listed([row.variant for row in others])} beside {baseline}"
    best = min(losses, key=lambda name: losses[name].mean)
    worst = max(losses, key=lambda name: losses[name].mean)
    if seeds < 2:
        if all(abs(ratio.mean - 1) < EVEN for ratio in losses.values()):
            return f"Validation losses end within {EVEN:.0%} of {baseline}'s".replace("%", " %")
        name = best if losses[best].mean < 1 else worst
        return f"{name} ends {_by(losses[name].mean)} {baseline} in validation loss"
    better = [name for name, ratio in losses.items() if ratio.high is not None and ratio.high < 1]
    worse = [name for name, ratio in losses.items() if ratio.low is not None and ratio.low > 1]
    if better:
        name = min(better, key=lambda name: losses[name].mean)
        return f"{name} ends {_by(losses[name].mean)} {baseline} in validation loss"
    if worse:
        return f"{_listed(worse)} {'ends' if len(worse) == 1 else 'end'} above {baseline} in validation loss"
    return f"No clear difference in validation loss from {baseline}"


def _calmest(others: Sequence[Row], baseline: str) -> str | None:
    """The greatest fall (or rise) of the feature oscillation that the figures carry."""
    found = {row.variant: row.ratios["feature_oscillation"] for row in others if "feature_oscillation" in row.ratios}
    if not found:
        return None
    name = min(found, key=lambda name: found[name].mean)
    if found[name].mean >= 1:
        name = max(found, key=lambda name: found[name].mean)
        return f"Features oscillate no less than {baseline}'s in any variant; in {name}: {change(found[name])}."
    if not _clear(found[name]):
        return f"Feature oscillation is lowest in {name}: {change(found[name])}, an interval that includes no change."
    return f"Features oscillate least in {name}: {change(found[name])} against {baseline}."


def _soonest(others: Sequence[Row]) -> str | None:
    factors = {
        row.variant: row.acceleration.factor
        for row in others
        if row.acceleration is not None and row.acceleration.factor is not None
    }
    late = [row.variant for row in others if row.acceleration is not None and row.acceleration.factor is None]
    parts = []
    if factors:
        name = max(factors, key=lambda name: factors[name].mean)
        between = factors[name]
        interval = "" if between.low is None else f" [{between.low:.2f}, {between.high:.2f}]"
        parts.append(f"{name} is at the baseline's final validation loss {between.mean:.2f}× as soon{interval}")
    if late:
        parts.append(f"{_listed(late)} {'does' if len(late) == 1 else 'do'} not reach it in every seed")
    return "; ".join(parts) + "." if parts else None


def _distance(others: Sequence[Row]) -> str | None:
    found = {row.variant: row.ratios["frechet"] for row in others if "frechet" in row.ratios}
    if not found:
        return None
    name = min(found, key=lambda name: found[name].mean)
    if found[name].mean >= 1:
        return "No variant's samples are nearer to the data than the baseline's by the Fréchet distance."
    doubt = "" if _clear(found[name]) or found[name].n < 2 else ", an interval that includes no change"
    return f"Samples are nearest to the data in {name}: Fréchet distance {change(found[name])}{doubt}."


def _caveat(seeds: int, steps: int, data: str) -> str:
    if seeds < 2:
        return f"One seed, {steps:,} steps on {data}: there is no interval, and differences of this size may be chance."
    return f"{seeds} seeds, {steps:,} steps on {data}; paired by seed, 95 % intervals, not corrected for their number."


def _by(ratio: float) -> str:
    """3.1 % below, or 2.2 % above."""
    share = abs(ratio - 1) * 100
    return f"{figure(float(f'{share:.2g}'))} % {'below' if ratio < 1 else 'above'}"


def _clear(ratio: Estimate) -> bool:
    if ratio.low is None or ratio.high is None:
        return True  # one seed: the caveat says what that is worth
    return ratio.high < 1 or ratio.low > 1


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
