"""What the runs show, in sentences computed from their numbers. No sentence claims more than its interval supports."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scalelong.experiments.comparison import CURVES, Comparison, Row
from scalelong.experiments.statistics import Estimate, change, plus_minus

EVEN = 0.02  # with one seed, losses closer than this count as equal
NAMES = {"none": "no scaling", "uniform": "uniform scaling", "ls": "LS"}


@dataclass(frozen=True)
class Findings:
    """The headline of a page, the sentences below it, and the caveat that applies to both."""

    headline: str
    details: tuple[str, ...] = ()
    caveat: str = ""


def findings(comparison: Comparison | None, labels: Sequence[str], steps: int, data: str) -> Findings:
    """Describe a comparison. Without numbers to compare, say only what the page shows."""
    if comparison is None or not any(row.means for row in comparison.rows):
        what = spell(labels[0]) if len(labels) == 1 else f"{len(labels)} runs"
        return Findings(_capital(f"{what} on {data}, {steps:,} steps"))
    key, baseline = comparison.loss, spell(comparison.baseline)
    others = [row for row in comparison.rows if row.variant != comparison.baseline and row.means]
    if not others:
        row = next(row for row in comparison.rows if row.means)
        value = f": validation loss {plus_minus(row.means[key])}" if key in row.means else ""
        return Findings(_capital(f"{spell(row.variant)} on {data} after {comparison.steps:,} steps{value}"))
    losses = _ratios(others, key)
    listed = "; ".join(f"{spell(name)} {change(ratio)}" for name, ratio in losses.items())
    lines = (
        f"{_capital(CURVES[key])} against {baseline}: {listed}." if losses else None,
        _best(
            _ratios(others, "feature_oscillation"),
            lambda name, by: f"Features oscillate least with {name}: {by} against {baseline}",
            f"Features oscillate less with {baseline} than with any of the others.",
        ),
        _sooner(others, baseline, key),
        _best(
            _ratios(others, "frechet"),
            lambda name, by: f"By Fréchet distance, samples with {name} are closest to the data: {by}",
            f"By Fréchet distance, no samples are closer to the data than those of {baseline}.",
        ),
    )
    seeds = max((ratio.n for row in others for ratio in row.ratios.values()), default=1)
    scope = f"{comparison.steps:,} steps on {data}"
    caveat = f"{seeds} seeds, {scope}; paired by seed, 95 % intervals, not corrected for their number."
    if seeds < 2:
        caveat = f"One seed, {scope}: there is no interval, and differences of this size may be chance."
    headline = f"{_join([row.variant for row in others])} beside {baseline}"
    if losses:
        headline = _headline(losses, baseline, seeds)
    return Findings(_capital(headline), tuple(line for line in lines if line), caveat)


def spell(label: str) -> str:
    """A variant in words: cs-0.7 → CS (κ = 0.7)."""
    cs = re.fullmatch(r"cs(-reverse)?-([0-9.e-]+)", label)
    return f"{'reversed ' if cs[1] else ''}CS (κ = {cs[2]})" if cs else NAMES.get(label, label)


def _headline(losses: Mapping[str, Estimate], baseline: str, seeds: int) -> str:
    """The largest gain that the numbers support, otherwise what is worse, otherwise that nothing is clear."""
    best, worst = _lowest(losses), max(losses, key=lambda name: losses[name].mean)
    if seeds < 2:
        spread = max(1.0, losses[worst].mean) / min(1.0, losses[best].mean) - 1
        if spread < EVEN:
            return f"validation losses end within {_percent(spread)} of each other"
        clear = best if losses[best].mean < 1 else worst
    else:
        better = {name: ratio for name, ratio in losses.items() if ratio.high is not None and ratio.high < 1}
        worse = [name for name, ratio in losses.items() if ratio.low is not None and ratio.low > 1]
        if not better and worse:
            return f"{_join(worse)} {'ends' if len(worse) == 1 else 'end'} above {baseline} in validation loss"
        if not better:
            return f"no clear difference in validation loss from {baseline}"
        clear = _lowest(better)
    ratio = losses[clear].mean
    by = f"{_percent(abs(ratio - 1))} {'below' if ratio < 1 else 'above'}"
    return f"{spell(clear)} ends {by} {baseline} in validation loss"


def _best(ratios: Mapping[str, Estimate], best: Callable[[str, str], str], none: str) -> str | None:
    """`best(variant, change)` for the variant with the lowest ratio, or `none` if the baseline is lower."""
    if not ratios:
        return None
    name = _lowest(ratios)
    if ratios[name].mean >= 1:
        return none
    low, high = ratios[name].low, ratios[name].high
    # With one seed there is no interval, and the caveat says what that is worth.
    doubt = "; the interval includes no change" if low is not None and high is not None and low <= 1 <= high else ""
    return f"{best(spell(name), change(ratios[name]))}{doubt}."


def _sooner(others: Sequence[Row], baseline: str, key: str) -> str | None:
    timed = {row.variant: row.sooner[key].factor for row in others if key in row.sooner}
    factors = {name: factor for name, factor in timed.items() if factor is not None}
    late = [name for name in timed if name not in factors]
    target = f"the final validation loss of {baseline}"
    parts = []
    if factors:
        name = max(factors, key=lambda name: factors[name].mean)
        factor = factors[name]
        interval = "" if factor.low is None else f" [{factor.low:.2f}, {factor.high:.2f}]"
        speed = "in as many steps" if abs(factor.mean - 1) < 0.02 else f"{factor.mean:.2f} times as soon"
        parts.append(f"{spell(name)} reaches {target} {speed}{interval}")
    if late:
        verb = "does" if len(late) == 1 else "do"
        parts.append(f"{_join(late)} {verb} not reach {'it' if factors else target} in every seed")
    return _capital("; ".join(parts)) + "." if parts else None


def _ratios(rows: Sequence[Row], key: str) -> Mapping[str, Estimate]:
    return {row.variant: row.ratios[key] for row in rows if key in row.ratios}


def _lowest(ratios: Mapping[str, Estimate]) -> str:
    return min(ratios, key=lambda name: ratios[name].mean)


def _percent(share: float) -> str:
    return f"{float(f'{share * 100:.2g}'):g} %"


def _join(labels: Sequence[str]) -> str:
    *names, last = map(spell, labels)
    return f"{', '.join(names)} and {last}" if names else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
