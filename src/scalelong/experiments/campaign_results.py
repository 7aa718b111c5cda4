"""What the records of a campaign say so far: tables, norms join by join, verdicts, and how many runs are missing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelong._text import with_interval
from scalelong.experiments.campaign import CLAIMS, SOONER, Plan
from scalelong.experiments.comparison import Comparison, RunMeasures
from scalelong.experiments.statistics import (
    Estimate,
    linear_fit,
    mean_interval,
    paired_difference,
    paired_ratio,
    slope_interval,
)
from scalelong.runs.logs import Series

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scalelong.experiments.statistics import Acceleration

ACCELERATION = 1.5
ONE_PAIR = "open (one pair)"
REPORTED = "reported, not judged"
NOT_IMAGES = "no verdict: the samples are not images"
DISTANCES = ("kid", "fid")
MIDDLE = "_middle"  # ends the key of a measure at the last join, of the middle block
EFFECTS = {
    "norm_outer": "Norm at the outer joins", "norm_inner": "Norm at the inner joins",
    f"norm{MIDDLE}": "Norm of the middle block's output (i = N)",
    "absolute_outer": "Absolute oscillation at the outer joins",
    "absolute_inner": "Absolute oscillation at the inner joins",
    "val_loss_ema": "Validation loss (EMA)", "kid": "KID of 8×8 pixel features",
    "headroom": "Headroom to fp16's 65,504",
}  # fmt: skip
DRAWN = ("norm_outer", "norm_inner", "val_loss_ema", "kid")  # of EFFECTS, those in the figure
CURVES = {"kid": "KID", "val_loss_ema": "validation loss (EMA)"}
FINAL = {**CURVES, "fid": "FID"}
FIGURES = {
    "norms.png": "Norm against step",
    "curves.png": "Distance and validation loss against step",
    "effects.png": "Variant over no scaling by level of each factor",
}


@dataclass(frozen=True)
class Verdict:
    """A claim about an arm against its baseline, and what the finished pairs of runs say about it.

    `key` is the measure, of CLAIMS, or SOONER.
    """

    key: str
    arm: str
    baseline: str
    claim: str
    measured: Estimate | None
    verdict: str
    bound: str = ""  # in words, of an acceleration that not every seed has

    @property
    def text(self) -> str:
        return self.bound if self.measured is None else f"{_cell(self.measured)} (n = {self.measured.n})"


def claims_table(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Lay verdicts out as a Markdown table: the heads, then one row per claim with one column per arm.

    A claim that the plan's rule does not judge has no verdict behind its measurement.
    """
    arms, claims = (list(dict.fromkeys(getattr(v, name) for v in verdicts)) for name in ("arm", "claim"))
    cells = {
        (v.claim, v.arm): v.text if v.verdict == REPORTED else f"{v.text} **{v.verdict}**".strip() for v in verdicts
    }
    return [["claim", *arms], *([claim, *(cells.get((claim, arm), "–") for arm in arms)] for claim in claims)]


class Results:
    """The finished runs of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.records = {name: record for name in plan.planned if (record := plan.record(name)) is not None}
        self.finished = [name for name, record in self.records.items() if record["failure"] is None]
        self.missing = len(plan.planned) - len(self.records)

    @property
    def scalings(self) -> list[str]:
        """The scalings that are compared with a baseline."""
        plan = self.plan
        return list(dict.fromkeys(arm.scaling for arm in plan.arms if plan.baseline_of(arm) != arm.name))

    @property
    def designed(self) -> bool:
        """Whether the arms are settings of a designed experiment, compared by level instead of one by one."""
        return any(arm.factors for arm in self.plan.arms)

    @property
    def state(self) -> str:
        """How many of the planned runs exist, in a sentence."""
        count, total = len(self.records), len(self.plan.planned)
        failed = count - len(self.finished)
        names = ", ".join(name for name in self.records if name not in self.finished)
        ended = f" ({failed} became non-finite: {names})" if failed else ""
        if lost := self.plan.untrainable:
            ended += f" ({', '.join(lost)} at none of the plan's learning rates)"
        arms = {arm.name: sum(r["arm"] == arm.name for r in self.records.values()) for arm in self.plan.arms}
        listed = "" if self.designed else ": " + ", ".join(f"{name} {n}" for name, n in arms.items())
        seeds = len(self.plan.seeds)
        return f"{count} of {total} planned runs are finished{ended}{listed}; {seeds} seeds are planned for each."

    def by_arm(self, name: str) -> dict[int, dict[str, Any]]:
        """seed → record of the finished runs of an arm."""
        return {self.records[n]["seed"]: self.records[n] for n in self.finished if self.records[n]["arm"] == name}

    def values(self, arm: str, key: str) -> dict[int, float]:
        """seed → value of a measure, of the seeds that have it."""
        found = {seed: _value(record, key) for seed, record in self.by_arm(arm).items()}
        return {seed: float(value) for seed, value in found.items() if value is not None}

    def families(self) -> dict[str, list[str]]:
        """baseline → the arms that are compared with it, itself first."""
        families: dict[str, list[str]] = {}
        for arm in self.plan.arms:
            own = families.setdefault(self.plan.baseline_of(arm), [self.plan.baseline_of(arm)])
            own += [] if arm.name in own else [arm.name]
        return families

    def comparison(self, baseline: str) -> Comparison:
        """The usual comparison of an arm family, from records instead of run folders."""
        arms = self.families()[baseline]
        runs = [measures_of(record) for arm in arms for record in self.by_arm(arm).values()]
        failed = [(r["arm"], r["seed"]) for r in self.records.values() if r["failure"] is not None]
        return Comparison(
            runs, arms, preset=self.plan.title, steps=self.plan.steps, seeds=self.plan.seeds, failed=failed
        )

    def verdicts(self) -> list[Verdict]:
        """Every claim about every arm that has at least one pair of runs."""
        found = []
        for baseline, arms in self.families().items():
            comparison = self.comparison(baseline)
            for arm in arms[1:]:
                claims = (self._claim(key, claim, arm, baseline) for key, claim in CLAIMS.items())
                found += [verdict for verdict in claims if verdict is not None]
                sooner = comparison.row(arm).sooner
                found += [self._sooner(key, sooner[key], arm, baseline) for key in CURVES if key in sooner]
        return found

    def _claim(self, key: str, claim: str, arm: str, baseline: str) -> Verdict | None:
        """The verdict on "the arm has less of a measure than its baseline"; None without a pair of runs."""
        own, base = self.values(arm, key), self.values(baseline, key)
        ratio = paired_ratio(own, base)
        if ratio is None:
            if not own.keys() & base.keys():
                return None
            # KID is unbiased: it may be negative
            return Verdict(key, arm, baseline, claim, None, "no verdict", "no ratio: a value is <= 0")
        verdict = judge(ratio, 1.0) if self._judged(key) else REPORTED
        lost = sum(r["failure"] is not None and r["arm"] in (arm, baseline) for r in self.records.values())
        if lost and verdict in ("agrees", "disagrees"):  # the seeds that are left may be the lucky ones
            verdict = f"open ({lost} became non-finite)"
        if key in DISTANCES and not self._images(arm, baseline):
            verdict = NOT_IMAGES
        return Verdict(key, arm, baseline, claim, ratio, verdict)

    def _sooner(self, key: str, sooner: Acceleration, arm: str, baseline: str) -> Verdict:
        """The verdict on "the arm reaches the baseline's last value of a curve in 1/1.5 of its steps"."""
        last, title = self._last_step(baseline, key), CURVES[key]
        value = f"final {title}" if last == self.plan.steps else f"{title} of step {last:,}"
        claim = f"reaches the baseline's {value} in 1/{ACCELERATION:g} of its steps"
        factor = sooner.factor
        if not self._judged(SOONER):
            verdict = REPORTED
        elif key in DISTANCES and not self._images(arm, baseline):
            verdict = NOT_IMAGES
        elif sooner.seeds < 2:
            verdict = ONE_PAIR
        elif factor is None:
            verdict = "open" if sooner.reached else "disagrees"
        else:
            low, high = (None if end is None else 1 / end for end in (factor.high, factor.low))
            verdict = judge(Estimate(1 / factor.mean, low, high, factor.n), 1 / ACCELERATION)
        return Verdict(SOONER, arm, baseline, claim, factor, verdict, sooner.bound)

    def _last_step(self, arm: str, key: str) -> int:
        """The last step at which a curve of an arm was measured; distances on the way may end before training does."""
        return max(int(r["curves"][key]["steps"][-1]) for r in self.by_arm(arm).values() if key in r["curves"])

    def _images(self, *arms: str) -> bool:
        """Whether the samples of all runs of the arms are images: nearer to the data than one constant image."""
        return all(record.get("images", True) for arm in arms for record in self.by_arm(arm).values())

    @property
    def without_images(self) -> list[str]:
        """The arms whose samples are not images, or whose baseline's are not."""
        pairs = ((arm.name, self.plan.baseline_of(arm)) for arm in self.plan.arms)
        return [arm for arm, baseline in pairs if arm != baseline and not self._images(arm, baseline)]

    def _judged(self, key: str) -> bool:
        return not self.plan.judged or key in self.plan.judged

    def joins(self, quantity: str = "norm") -> dict[str, list[Estimate | None]]:
        """arm → ratio to its baseline of a quantity of ‖h_i‖, for every join i."""
        tables = (self.comparison(baseline).pointwise("backbone", quantity) for baseline in self.families())
        return {arm: row for table in tables for arm, row in table.items()}

    def effects(self, key: str) -> dict[tuple[str, str], dict[str, Estimate | None]]:
        """Of a designed experiment: factor and level → scaling → variant/baseline of a measure.

        A setting's ratio is the mean over its seeds; the interval is over the settings that have the level.
        """
        pairs = self._ratios(key)
        table = {}
        for factor, level in [("all", "settings"), *self._levels()]:
            cells = {}
            for scaling in self.scalings:
                ratios = pairs.get(scaling, {})
                have = [
                    r for name, r in ratios.items() if factor == "all" or self.plan.arm(name).factors[factor] == level
                ]
                cells[scaling] = paired_ratio(dict(enumerate(have)), dict.fromkeys(range(len(have)), 1.0))
            table[factor, str(level)] = cells
        return table

    def corners(self) -> dict[tuple[tuple[str, str], str], str]:
        """Of a designed experiment: (factor and level), scaling → helps or hurts, if the loss's interval excludes 1."""
        words = {"agrees": "helps", "disagrees": "hurts"}
        judged = {
            (corner, scaling): judge(ratio, 1.0)
            for corner, cells in self.effects("val_loss_ema").items()
            for scaling, ratio in cells.items()
            if ratio is not None
        }
        return {place: words[verdict] for place, verdict in judged.items() if verdict in words}

    def exponents(self, key: str) -> dict[str, dict[str, Estimate]]:
        """Of a designed experiment: factor → scaling → p of variant/baseline ∝ level^p, over the factors with numbers.

        The other factors count as noise. `steps` is the difference of the growth of norms over the second half.
        """
        table: dict[str, dict[str, Estimate]] = {}
        for scaling, ratios in self._ratios(key).items():
            arms = [(self.plan.arm(name), math.log(ratio)) for name, ratio in ratios.items()]
            for factor in arms[0][0].factors:
                if not all(_positive(arm.factors[factor]) for arm, _ in arms):
                    continue
                points = [(math.log(arm.factors[factor]), ratio) for arm, ratio in arms]
                if len({level for level, _ in points}) > 1:
                    table.setdefault(factor, {})[scaling] = slope_interval(points)
            changes = []
            for arm, _ in arms if key.startswith("norm") else ():
                growth = key.replace("norm", "growth")
                own, base = self.values(arm.name, growth), self.values(self.plan.baseline_of(arm), growth)
                if (change := paired_difference(own, base)) is not None:
                    changes.append(change.mean)  # the interval is over settings, as in `effects`
            if changes:
                table.setdefault("steps", {})[scaling] = mean_interval(changes)
        return table

    def growths(self, key: str) -> dict[str, dict[str, Estimate]]:
        """Of a designed experiment whose factors are all numbers: factor → scaling → p of norm ∝ level^p.

        That is the norm itself, not its ratio to the baseline's, with all factors fitted together. `steps` is the
        growth over the second half of training.
        """
        table: dict[str, dict[str, Estimate]] = {}
        if not all(_positive(level) for _, level in self._levels()):
            return table
        for scaling in dict.fromkeys(arm.scaling for arm in self.plan.arms):
            keys = (key, key.replace("norm", "growth"))
            own = [arm for arm in self.plan.arms if arm.scaling == scaling]
            arms = [arm for arm in own if all(self.values(arm.name, name) for name in keys)]
            norms, growths = (
                [mean_interval(list(self.values(arm.name, name).values())).mean for arm in arms] for name in keys
            )
            rows = [[math.log(level) for level in arm.factors.values()] for arm in arms]
            if rows and (fit := linear_fit(rows, np.log(norms).tolist())) is not None:
                for factor, slope in zip(arms[0].factors, fit, strict=True):
                    table.setdefault(factor, {})[scaling] = slope
                table.setdefault("steps", {})[scaling] = mean_interval(growths)
        return table

    def _levels(self) -> Iterator[tuple[str, Any]]:
        """Every factor with its levels: numbers in order, words as the plan has them."""
        for factor in dict.fromkeys(name for arm in self.plan.arms for name in arm.factors):
            levels = list(dict.fromkeys(arm.factors[factor] for arm in self.plan.arms))
            if all(map(_positive, levels)):
                levels.sort()
            yield from ((factor, level) for level in levels)

    def _ratios(self, key: str) -> dict[str, dict[str, float]]:
        """scaling → arm → variant/baseline of a measure, the mean over seeds. No distance of what is not an image."""
        pairs: dict[str, dict[str, float]] = {}
        for arm in self.plan.arms:
            if key in DISTANCES and not self._images(arm.name, self.plan.baseline_of(arm)):
                continue
            own, base = self.values(arm.name, key), self.values(self.plan.baseline_of(arm), key)
            ratio = paired_ratio(own, base)
            if ratio is not None and self.plan.baseline_of(arm) != arm.name:
                pairs.setdefault(arm.scaling, {})[arm.name] = ratio.mean
        return pairs

    def to_dict(self) -> dict[str, Any]:
        verdicts = [asdict(verdict) for verdict in self.verdicts()]
        joins = {q: {arm: [None if e is None else asdict(e) for e in row] for arm, row in self.joins(q).items()}
                 for q in ("norm", "absolute_oscillation", "relative_oscillation")}  # fmt: skip
        return {
            "campaign": self.plan.folder.name, "title": self.plan.title, "state": self.state,
            "planned": len(self.plan.planned), "finished": len(self.records), "verdicts": verdicts, "joins": joins,
        }  # fmt: skip


def _value(record: dict[str, Any], key: str) -> float | None:
    if not key.endswith(MIDDLE):
        value: float | None = record["values"].get(key)
        return value
    joins: list[float | None] = (record["norms"].get("backbone") or {}).get(key.removesuffix(MIDDLE)) or [None]
    return joins[-1]


def _positive(level: Any) -> bool:
    """Whether a level is a number that has a logarithm."""
    return isinstance(level, int | float) and not isinstance(level, bool) and level > 0


def judge(ratio: Estimate, edge: float) -> str:
    """The rule: agrees if the whole interval lies below the edge, disagrees if it lies above, otherwise open."""
    if ratio.low is None or ratio.high is None:
        return ONE_PAIR
    return "agrees" if ratio.high < edge else "disagrees" if ratio.low > edge else "open"


def measures_of(record: dict[str, Any]) -> RunMeasures:
    """The measures of a run from its record, as `measure_run` has them from the run folder."""
    values = {key: value for key, value in record["values"].items() if value is not None}
    images = record.get("images", True)
    return RunMeasures(record["arm"], record["seed"], "", values, _curves(record), images=images, norms=record["norms"])


def _curves(record: dict[str, Any]) -> dict[str, Series]:
    curves = {}
    for name, curve in record["curves"].items():
        if name in CURVES:
            values = [math.nan if value is None else value for value in curve["values"]]
            curves[name] = Series(np.array(curve["steps"], dtype=float), np.array(values, dtype=float)).finite()
    return curves


def page(results: Sequence[Results]) -> str:
    """The Markdown of docs/campaign.md below its introduction."""
    parts = []
    for one in results:
        plan = one.plan
        folder = plan.folder.as_posix()
        command = f"`scalelong campaign {folder}` {'runs the rest' if one.missing else 'ran them'}."
        parts.append(f"## {plan.title}\n\n{plan.question}\n\n**State:** {one.state} {command}")
        parts.append(
            f"Plan: [`{folder}/plan.toml`](../{folder}/plan.toml), stated before the runs; its head has any amendment."
        )
        for name, title in FIGURES.items():
            if (plan.folder / name).exists():
                parts.append(f"![{title}](../{folder}/{name})")
        parts += _tuning(one) + _final(one)
        parts += _corners(one) if one.designed else []
        parts += _effects(one) if one.designed else []
        if not one.designed and (joins := one.joins()):
            parts.append("Norm ‖h_i‖ at the end, against the baseline of the same seed (95 % interval), join by join:")
            columns = ["arm", *(f"i = {i + 1}" for i in range(max(map(len, joins.values()))))]
            rows = [[arm, *map(_cell, row)] for arm, row in joins.items()]
            parts.append(_table(columns, rows))
        if not one.designed and len(claims := overview(one)) > 1:
            parts += [
                "Claims, arm over baseline. Only what the plan's rule judges has a verdict:",
                _table(claims[0], claims[1:]),
            ]
    return "\n\n".join(parts) + "\n"


def overview(results: Results) -> list[list[str]]:
    """The heads and rows of one table: claims by arm, or of a designed experiment every measure over all settings."""
    if not results.designed:
        return claims_table(results.verdicts())
    over_all = {key: results.effects(key)["all", "settings"].values() for key in EFFECTS}
    rows = [[EFFECTS[key], *map(_cell, cells)] for key, cells in over_all.items() if any(cells)]
    return [["all settings", *results.scalings], *rows]


def _effects(results: Results) -> list[str]:
    """Of a designed experiment: every measure over all settings, and folded away by level with the exponents."""
    effects = {key: results.effects(key) for key in EFFECTS}
    effects = {key: table for key, table in effects.items() if any(any(cells.values()) for cells in table.values())}
    scalings = results.scalings
    columns, *rows = overview(results)
    parts = ["Variant over no scaling:", _table(columns, rows)] if rows else []
    if "kid" in effects and (lost := results.without_images):
        parts.append(
            f"KID leaves out {len(lost)} arms whose samples are no nearer to the data than one constant image."
        )
    for key, table in effects.items():
        rows = [
            [f"{factor} {level}", *map(_cell, cells.values())]
            for (factor, level), cells in table.items()
            if any(cells.values()) and factor != "all"
        ]
        fold = [f'<details markdown="1"><summary>{EFFECTS[key]} by level</summary>', _table(["", *scalings], rows)]
        rows = [[factor, *(_cell(cells.get(s)) for s in scalings)] for factor, cells in results.exponents(key).items()]
        if rows:
            fold += ["The exponent p of this ratio in a factor, ratio ∝ level^p:", _table(["", *scalings], rows)]
        if key.startswith("norm") and (growths := results.growths(key)):
            names = list(growths["steps"])
            rows = [[factor, *map(_cell, cells.values())] for factor, cells in growths.items()]
            fold += ["The norm itself, all factors fitted together, norm ∝ level^p:", _table(["", *names], rows)]
        parts += [*fold, "</details>"]
    return parts


def _tuning(results: Results) -> list[str]:
    """The validation loss at every learning rate that was tried, that of the main runs in bold."""
    tuning = results.plan.tuning
    if tuning is None:
        return []
    rows = []
    for arm in results.plan.arms:
        if losses := results.plan.tuning_losses(arm):
            texts = {lr: f"{loss:.4g}" if math.isfinite(loss) else "failed" for lr, loss in losses.items()}
            if (chosen := results.plan.learning_rate(arm)) is not None:
                texts[chosen] = f"**{texts[chosen]}**"
            rows.append([arm.name, *(texts.get(lr, "–") for lr in tuning.lr)])
    title = f"Learning rates: validation loss (EMA) after {tuning.steps:,} steps, one seed; the lowest decides:"
    return [title, _table(["arm", *(f"lr {lr:g}" for lr in tuning.lr)], rows)] if rows else []


def _final(results: Results) -> list[str]:
    """How the arms ended, or the scalings of a designed experiment."""
    if not results.finished:
        return []
    if results.designed:
        rows = []
        for scaling in dict.fromkeys(arm.scaling for arm in results.plan.arms):
            names = {arm.name for arm in results.plan.arms if arm.scaling == scaling}
            own = [record for record in results.records.values() if record["arm"] in names]
            if own:
                failed, alarms = (sum(bool(r[key]) for r in own) for key in ("failure", "alarms"))
                rows.append([scaling, str(len(own)), str(failed), str(alarms)])
        return ["How runs ended:", _table(["scaling", "runs", "non-finite", "with an alarm"], rows)]
    found = {key: title for key, title in FINAL.items() if any(results.values(a.name, key) for a in results.plan.arms)}
    rows = []
    for arm in results.plan.arms:
        if runs := results.by_arm(arm.name):
            rates = ", ".join(dict.fromkeys(f"{record['config']['train']['lr']:g}" for record in runs.values()))
            values = (list(results.values(arm.name, key).values()) for key in found)
            means = (mean_interval(own) if own else None for own in values)
            rows.append([arm.name, str(len(runs)), rates, *map(_cell, means)])
    return ["At the end, mean over seeds (95 % interval):", _table(["arm", "runs", "lr", *found.values()], rows)]


def _corners(results: Results) -> list[str]:
    """In which corner a scaling helps or hurts, by the interval of the validation loss, with the norm beside it."""
    losses, norms = results.effects("val_loss_ema"), results.effects("norm_outer")
    judged = [e for cells in losses.values() for e in cells.values() if e is not None and e.low is not None]
    if not judged:
        return []
    rule = f"The 95 % interval of the validation loss excludes 1 in {{}} of {len(judged)} comparisons below"
    chance = f"({len(judged) / 20:.2g} expected by chance)"
    found = results.corners()
    if not found:
        return [f"{rule.format('none')} {chance}."]
    rows = [
        [scaling, " ".join(corner), _cell(losses[corner][scaling]), _cell(norms[corner][scaling]), f"**{verdict}**"]
        for (corner, scaling), verdict in found.items()
    ]
    table = _table(["scaling", "level", "validation loss (EMA)", "norm at the outer joins", ""], rows)
    return [f"{rule.format(len(found))} {chance}:", table]


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _cell(estimate: Estimate | None) -> str:
    return "–" if estimate is None else with_interval(estimate.mean, estimate.low, estimate.high)
