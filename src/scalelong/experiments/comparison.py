"""The result of a comparison: every run's figures, their means over seeds, and what is paired by seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.experiments.acceleration import Acceleration, acceleration
from scalelong.experiments.measures import CURVES, MEASURES, Measure, RunMeasures
from scalelong.experiments.statistics import Estimate, mean_interval, paired_ratio, statement
from scalelong.files import write_text
from scalelong.runs.logs import Series

FILE = "comparison.json"
FORMAT = 1
LAG = 0.05


@dataclass(frozen=True)
class Row:
    """One variant: means over its seeds; ratios to the baseline and accelerations, paired by seed (none of itself).

    `sooner` has an acceleration for every curve that was logged.
    """

    variant: str
    means: dict[str, Estimate]
    ratios: dict[str, Estimate]
    sooner: dict[str, Acceleration]


@dataclass(frozen=True)
class Comparison:
    """What `scalelong compare` found.

    `loss` is the key of the validation loss that variants are judged by: the EMA's, which is that of the network one
    samples from and is less noisy, unless the EMA still lags behind the network it averages.
    """

    preset: str
    steps: int
    seeds: tuple[int, ...]
    baseline: str
    loss: str
    rows: tuple[Row, ...]
    runs: tuple[RunMeasures, ...]
    missing: tuple[str, ...]  # runs that are not there, each with its reason
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing

    def row(self, variant: str) -> Row:
        return next(row for row in self.rows if row.variant == variant)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "preset": self.preset,
            "steps": self.steps,
            "seeds": list(self.seeds),
            "baseline": self.baseline,
            "loss": self.loss,
            "complete": self.complete,
            "measures": {m.key: {"title": m.title, "note": m.note} for m in self.measures()},
            "rows": [
                {
                    "variant": row.variant,
                    "means": {key: estimate.to_dict() for key, estimate in row.means.items()},
                    "ratios": {key: estimate.to_dict() for key, estimate in row.ratios.items()},
                    "sooner": {key: found.to_dict() for key, found in row.sooner.items()},
                }
                for row in self.rows
            ],
            "runs": [
                {"variant": run.variant, "seed": run.seed, "folder": Path(run.folder).name, "values": run.values}
                for run in self.runs
            ],
            "missing": list(self.missing),
            "statistics": statement(len(self.seeds)),
            "notes": list(self.notes),
        }

    def measures(self) -> list[Measure]:
        """The measures that at least one run has; a Fréchet distance by its full name."""
        found = [m for m in MEASURES if any(m.key in run.values for run in self.runs)]
        names = {m.key: {run.names[m.key] for run in self.runs if m.key in run.names} for m in found}
        return [replace(m, title=next(iter(names[m.key]))) if len(names[m.key]) == 1 else m for m in found]

    def curves(self) -> dict[str, str]:
        """The curves by which a variant may be sooner, with their titles: the one validation loss, and FIDs."""
        there = {key for row in self.rows for key in row.sooner} - ({"val_loss", "val_loss_ema"} - {self.loss})
        return {key: title for key, title in CURVES.items() if key in there}

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")


def summarise(
    runs: Sequence[RunMeasures],
    variants: Sequence[str],
    *,
    preset: str,
    steps: int,
    seeds: Sequence[int],
    missing: Sequence[str] = (),
) -> Comparison:
    """Means, paired ratios and accelerations of finished runs; the first variant is the baseline."""
    baseline = variants[0]
    by_variant = {name: [run for run in runs if run.variant == name] for name in variants}
    loss = judged_by(runs)
    rows = tuple(_row(name, by_variant[name], by_variant[baseline], name == baseline) for name in variants)
    return Comparison(
        preset=preset,
        steps=steps,
        seeds=tuple(seeds),
        baseline=baseline,
        loss=loss,
        rows=rows,
        runs=tuple(runs),
        missing=tuple(missing),
        notes=tuple(_notes(runs, rows, baseline, loss)),
    )


def judged_by(runs: Sequence[RunMeasures]) -> str:
    """val_loss_ema, or val_loss where the EMA's is more than LAG above the network's own in the mean of all runs."""
    pairs = [(run.values.get("val_loss_ema"), run.values.get("val_loss")) for run in runs]
    ratios = [ema / own for ema, own in pairs if ema is not None and own]
    return "val_loss_ema" if ratios and sum(ratios) / len(ratios) <= 1 + LAG else "val_loss"


def _row(name: str, runs: Sequence[RunMeasures], baseline: Sequence[RunMeasures], is_baseline: bool) -> Row:
    means: dict[str, Estimate] = {}
    ratios: dict[str, Estimate] = {}
    for measure in MEASURES:
        own, theirs = _values(runs, measure.key), _values(baseline, measure.key)
        if own:
            means[measure.key] = mean_interval(list(own.values()))
        ratio = None if is_baseline else paired_ratio(own, theirs)
        if ratio is not None:
            ratios[measure.key] = ratio
    sooner = {}
    for key in () if is_baseline else CURVES:
        found = acceleration(_curves(runs, key), _curves(baseline, key))
        if found is not None:
            sooner[key] = found
    return Row(name, means, ratios, sooner)


def _values(runs: Sequence[RunMeasures], key: str) -> Mapping[int, float]:
    return {run.seed: run.values[key] for run in runs if key in run.values}


def _curves(runs: Sequence[RunMeasures], key: str) -> Mapping[int, Series]:
    return {run.seed: run.curves[key] for run in runs if key in run.curves}


def _notes(runs: Sequence[RunMeasures], rows: Sequence[Row], baseline: str, loss: str) -> list[str]:
    notes = []
    for key in ("frechet", "on_the_way"):
        names = sorted({run.names[key] for run in runs if key in run.names})
        if len(names) > 1:
            notes.append(f"the Fréchet distances are not of one kind and do not compare: {'; '.join(names)}")
    if any(row.sooner for row in rows):
        notes.append(
            f"sooner: the steps at which {baseline} first was at its own final value, over the steps at which the "
            "variant was there (linear between two measurements), seed by seed"
        )
    for row in rows:
        found = row.sooner.get(loss)
        late = 0 if found is None else len(found.steps) - found.reached
        if found is not None and late:
            notes.append(
                f"{row.variant} did not reach {baseline}'s final validation loss in {late} of {len(found.steps)} "
                f"seed(s), so it has no factor; in those it is below {found.at_most:.2f}×"
            )
    return notes
