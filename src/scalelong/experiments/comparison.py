"""The result of a comparison: the measures of every run, their means over seeds, and ratios paired by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalelong.experiments.statistics import (
    Acceleration,
    Estimate,
    acceleration,
    change,
    mean_interval,
    paired_ratio,
    plus_minus,
    statistics_note,
)
from scalelong.files import write_text
from scalelong.monitor.snapshot import jumps, spread
from scalelong.runs.logs import Series
from scalelong.runs.run import Run

FORMAT = 1
LAG = 0.05  # the EMA's validation loss may exceed the network's own by this share before it counts as lagging

# ----------------------------------------------------------------------------------------------------- measures


@dataclass(frozen=True)
class Measure:
    """A row of the table. Lower is better in all of them."""

    key: str
    title: str
    note: str


MEASURES = (
    Measure("val_loss", "validation loss", "of the trained network at the end, on held-out images with fixed noise"),
    Measure("val_loss_ema", "validation loss (EMA)",
            "the same of the EMA network, which generates the samples; it lags behind early in a run"),
    Measure("frechet", "Fréchet distance", "of samples from the EMA network to the training data"),
    Measure("on_the_way", "Fréchet distance by training", "the last that training itself measured (evaluate.every)"),
    Measure("feature_oscillation", "feature oscillation",
            "standard deviation of the jumps of log(norm) over one step, on a fixed probe batch, in the second half of "
            "training: mean over the features h_i that the long skips join"),
    Measure("middle_oscillation", "middle block's oscillation",
            "the same of h_N alone, the middle block's output, which joins the innermost long skip"),
    Measure("gradient_oscillation", "gradient oscillation",
            "standard deviation of the jumps of log(gradient norm) between two training batches, before clipping, in "
            "the second half of training"),
    Measure("seconds", "time, s", "in training steps, without start-up, validation and sampling"),
    Measure("cpu_seconds", "CPU time, s", "of the whole process: includes start-up, validation and sample grids"),
    Measure("memory", "peak memory, MiB", "of the process, or of the GPU if there is one"),
)  # fmt: skip
# Curves that fall as a run improves: a variant may reach the baseline's final value sooner.
CURVES = {
    "val_loss": "validation loss",
    "val_loss_ema": "validation loss (EMA)",
    "fid": "FID",
    "frechet": "Fréchet distance",
}


@dataclass(frozen=True)
class RunMeasures:
    """The measures of one run, and the curves for accelerations.

    `names` has the full name of a measure whose kind the user chooses, such as the Fréchet distance.
    """

    variant: str
    seed: int
    folder: str
    values: dict[str, float]
    curves: dict[str, Series]
    names: dict[str, str] = field(default_factory=dict)


def measure_run(run: Run, variant: str, seed: int) -> RunMeasures:
    """Measure a run by the files in its folder. What they do not contain is left out."""
    evaluations = {"frechet": run.evaluations.get("compare"), "on_the_way": run.evaluations.get("train")}
    memory = run.resources.get("peak_gpu_memory") or run.resources.get("peak_memory")
    values: dict[str, Any] = {
        "val_loss": run.column("val_loss").last,
        "val_loss_ema": run.column("val_loss_ema").last,
        **{key: stored.get("frechet") for key, stored in evaluations.items() if stored},
        **_oscillations(run),
        "seconds": run.column("seconds").last,
        "cpu_seconds": run.resources.get("cpu_seconds"),
        "memory": memory / 2**20 if memory else None,
    }
    return RunMeasures(
        variant,
        seed,
        str(run.folder),
        {key: float(v) for key, v in values.items() if isinstance(v, (int, float)) and np.isfinite(v)},
        {key: run.column(key) for key in CURVES if len(run.column(key))},
        {key: str(stored["card"].get("metric", "Fréchet distance")) for key, stored in evaluations.items() if stored},
    )


def late_oscillation(norms: Series) -> float | None:
    """The oscillation of log(norm) between successive entries, over the second half."""
    if len(norms) < 4:
        return None
    late = norms.values[norms.steps >= (norms.steps[0] + norms.steps[-1]) / 2].tolist()
    differences = torch.tensor(jumps(late[1:], late[:-1]), dtype=torch.float64)
    value = float(spread(differences[:, None]))
    return value if math.isfinite(value) else None


def _oscillations(run: Run) -> dict[str, float | None]:
    """From the monitor's log, whose jumps span one step; without it, the gradient's between logged steps."""
    log = run.stability
    if log is None:
        return {"gradient_oscillation": late_oscillation(run.column("grad_norm"))}
    spreads = log.oscillation("probe", "backbone")
    return {
        "feature_oscillation": None if spreads is None else float(np.nanmean(spreads)),
        "middle_oscillation": None if spreads is None else float(spreads[-1]),
        "gradient_oscillation": log.gradient_oscillation(),
    }


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Row:
    """One variant: means over its seeds; ratios and accelerations against the baseline, paired by seed.

    The baseline itself has no ratios and accelerations. `sooner` has one entry per logged curve.
    """

    variant: str
    means: dict[str, Estimate]
    ratios: dict[str, Estimate]
    sooner: dict[str, Acceleration]


@dataclass(frozen=True)
class Comparison:
    """The result of `scalelong compare`.

    `loss` is the key of the validation loss that ranks variants: that of the EMA network, which generates the samples
    and is less noisy, unless the EMA still lags behind the network that it averages.
    """

    preset: str
    steps: int
    seeds: tuple[int, ...]
    baseline: str
    loss: str
    rows: tuple[Row, ...]
    runs: tuple[RunMeasures, ...]
    missing: tuple[str, ...]  # runs without a result, each with the reason
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing

    def row(self, variant: str) -> Row:
        return next(row for row in self.rows if row.variant == variant)

    def measures(self) -> list[Measure]:
        """The measures that at least one run has; a Fréchet distance with its full name."""
        measures = []
        for measure in MEASURES:
            names = {run.names[measure.key] for run in self.runs if measure.key in run.names}
            if any(measure.key in run.values for run in self.runs):
                measures.append(replace(measure, title=names.pop()) if len(names) == 1 else measure)
        return measures

    def table(self) -> list[tuple[str, str, list[tuple[str, str]]]]:
        """Title, note and, for each variant, mean and change (as text, may be empty) of each row of the table."""
        table = []
        for measure in self.measures():
            cells = []
            for row in self.rows:
                mean, ratio = row.means.get(measure.key), row.ratios.get(measure.key)
                cells.append(("–" if mean is None else plus_minus(mean), "" if ratio is None else change(ratio)))
            table.append((measure.title, measure.note, cells))
        for key, title in self.curves().items():
            cells = [(str(row.sooner[key]) if key in row.sooner else "", "") for row in self.rows]
            table.append(("sooner", f"at the baseline's final {title}", cells))
        return table

    def curves(self) -> dict[str, str]:
        """Key and title of the curves that have accelerations: the validation loss that ranks, and FIDs."""
        keys = {key for row in self.rows for key in row.sooner} - ({"val_loss", "val_loss_ema"} - {self.loss})
        return {key: title for key, title in CURVES.items() if key in keys}

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
                {"variant": row.variant}
                | {
                    name: {key: value.to_dict() for key, value in getattr(row, name).items()}
                    for name in ("means", "ratios", "sooner")
                }
                for row in self.rows
            ],
            "runs": [
                {"variant": run.variant, "seed": run.seed, "folder": Path(run.folder).name, "values": run.values}
                for run in self.runs
            ],
            "missing": list(self.missing),
            "statistics": statistics_note(len(self.seeds)),
            "notes": list(self.notes),
        }

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
    """Compute means, paired ratios and accelerations of finished runs; the first variant is the baseline."""
    baseline, loss = variants[0], ranking_loss(runs)
    rows = tuple(_row(name, runs, baseline) for name in variants)
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


def ranking_loss(runs: Sequence[RunMeasures]) -> str:
    """`val_loss_ema`, or `val_loss` if the EMA's is more than LAG above the network's own in the mean over all runs."""
    pairs = [(run.values.get("val_loss_ema"), run.values.get("val_loss")) for run in runs]
    ratios = [ema / own for ema, own in pairs if ema is not None and own]
    return "val_loss_ema" if ratios and sum(ratios) / len(ratios) <= 1 + LAG else "val_loss"


def _row(variant: str, runs: Sequence[RunMeasures], baseline: str) -> Row:
    own = [run for run in runs if run.variant == variant]
    base = [run for run in runs if run.variant == baseline] if variant != baseline else []
    row = Row(variant, {}, {}, {})
    for measure in MEASURES:
        values, reference = ({r.seed: r.values[measure.key] for r in side if measure.key in r.values}
                             for side in (own, base))  # fmt: skip
        if values:
            row.means[measure.key] = mean_interval(list(values.values()))
        if (ratio := paired_ratio(values, reference)) is not None:
            row.ratios[measure.key] = ratio
    for key in CURVES:
        curves, targets = ({r.seed: r.curves[key] for r in side if key in r.curves} for side in (own, base))
        if (sooner := acceleration(curves, targets)) is not None:
            row.sooner[key] = sooner
    return row


def _notes(runs: Sequence[RunMeasures], rows: Sequence[Row], baseline: str, loss: str) -> list[str]:
    notes = []
    for key in ("frechet", "on_the_way"):
        names = sorted({run.names[key] for run in runs if key in run.names})
        if len(names) > 1:
            notes.append(f"the Fréchet distances are of different kinds and do not compare: {'; '.join(names)}")
    if any(row.sooner for row in rows):
        notes.append(
            f"sooner: the step at which {baseline} first reaches its own final value, divided by the step at which the "
            "variant reaches it (linear between two measurements), seed by seed"
        )
    for row in rows:
        sooner = row.sooner.get(loss)
        if sooner is not None and sooner.factor is None:
            late = len(sooner.steps) - sooner.reached
            notes.append(
                f"{row.variant} did not reach {baseline}'s final validation loss in {late} of {len(sooner.steps)} "
                f"seed(s), so it has no factor; in those it is below {sooner.at_most:.2f}×"
            )
    return notes
