"""What the runs show, in sentences computed from their numbers. No sentence claims more than its interval supports."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalelong._text import number
from scalelong.experiments.comparison import CURVES, Comparison, Row
from scalelong.experiments.statistics import Estimate, change, plus_minus

EVEN = 0.02  # with one seed, losses closer than this count as equal
STABILITY = ("norm_outer", "norm_inner", "feature_oscillation")  # measures with a sentence of their own
NAMES = {"none": "no scaling", "uniform": "1/√2", "ls": "LS"}


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
        return Findings(_capital(f"{what} on {data}, {steps:,} step{'' if steps == 1 else 's'}"))
    key, baseline = comparison.loss, spell(comparison.baseline)
    others = [row for row in comparison.rows if row.variant != comparison.baseline and row.means]
    if not others:
        row = next(row for row in comparison.rows if row.means)
        value = f": validation loss {plus_minus(row.means[key])}" if key in row.means else ""
        return Findings(_capital(f"{spell(row.variant)} on {data} after {comparison.steps:,} steps{value}"))
    losses = {row.variant: row.ratios[key] for row in others if key in row.ratios}
    titles = {measure.key: measure.title for measure in comparison.measures()}
    seeds = max((ratio.n for row in others for ratio in row.ratios.values()), default=1)
    headline = f"{_join([row.variant for row in others])} beside {baseline}"
    failed = ", ".join(f"{spell(name)} with seed {seed}" for name, seed in comparison.failed)
    lost = f"Not in any ratio, because training became non-finite: {failed}." if failed else ""
    if seeds < 2:
        values = {row.variant: row.means[key].mean for row in comparison.rows if key in row.means}
        caveat = "One seed: there is no interval, and a difference may be chance; compare --seeds 3 gives intervals."
        caveat += f" {lost}" if lost else ""
        return Findings(_capital(_range(values) if losses else headline), (), caveat)  # no sentence without an interval
    lines = [_clear(titles[name], others, name, baseline) for name in titles if name in (key, *STABILITY)]
    lines.append(_sooner(others, baseline, key))
    lines += [_clear(titles["frechet"], others, "frechet", baseline)] if "frechet" in titles else []
    if losses:
        headline = _headline(losses, baseline)
    return Findings(_capital(headline), tuple(filter(None, lines)), lost)


def spell(label: str) -> str:
    """A variant in words: cs-0.7 → CS (κ = 0.7)."""
    cs = re.fullmatch(r"cs(-reverse)?-([0-9.e-]+)", label)
    return f"{'reversed ' if cs[1] else ''}CS (κ = {cs[2]})" if cs else NAMES.get(label, label)


def _range(values: Mapping[str, float]) -> str:
    """The losses of one seed: how far apart they are, without a claim about which is better."""
    best, worst = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    spread = values[worst] / values[best] - 1 if values[best] > 0 else math.inf
    if spread < EVEN:
        return f"validation losses end within {_percent(spread)} of each other"
    low, high = (f"{number(values[name])} ({spell(name)})" for name in (best, worst))
    return f"validation losses end between {low} and {high}"


def _headline(losses: Mapping[str, Estimate], baseline: str) -> str:
    """The largest gain that the intervals support, otherwise what is worse, otherwise that nothing is clear."""
    better = {name: ratio for name, ratio in losses.items() if ratio.excludes_one and ratio.mean < 1}
    worse = [name for name, ratio in losses.items() if ratio.excludes_one and ratio.mean > 1]
    if better:
        best = min(better, key=lambda name: better[name].mean)
        return f"{spell(best)} ends {_percent(1 - better[best].mean)} below {baseline} in validation loss"
    if worse:
        return f"{_join(worse)} {'ends' if len(worse) == 1 else 'end'} above {baseline} in validation loss"
    return f"no clear difference in validation loss from {baseline}"


def _clear(title: str, rows: Sequence[Row], key: str, baseline: str) -> str | None:
    """The variants whose interval excludes no change, with their changes."""
    ratios = {row.variant: row.ratios[key] for row in rows if key in row.ratios}
    listed = "; ".join(f"{spell(name)} {change(ratio)}" for name, ratio in ratios.items() if ratio.excludes_one)
    return f"{_capital(title)} against {baseline}: {listed}." if listed else None


def _sooner(rows: Sequence[Row], baseline: str, key: str) -> str | None:
    factors = {row.variant: row.sooner[key].factor for row in rows if key in row.sooner}
    clear = {name: factor for name, factor in factors.items() if factor is not None and factor.excludes_one}
    listed = "; ".join(f"{spell(n)} {f.mean:.2f} times as soon [{f.low:.2f}, {f.high:.2f}]" for n, f in clear.items())
    return f"The final {CURVES[key]} of {baseline} is reached: {listed}." if clear else None


def _percent(share: float) -> str:
    return f"{float(f'{share * 100:.2g}'):g} %"


def _join(labels: Sequence[str]) -> str:
    *names, last = map(spell, labels)
    return f"{', '.join(names)} and {last}" if names else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
