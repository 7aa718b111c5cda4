"""The result of a comparison: the measures of every run, their means over seeds, and ratios paired by seed."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scalelong.evaluation.evaluate import stored_metrics
from scalelong.experiments.statistics import (
    Acceleration,
    Estimate,
    acceleration,
    change,
    difference,
    mean_interval,
    paired_difference,
    paired_ratio,
    plus_minus,
    statistics_note,
)  # fmt: skip
from scalelong.files import write_text
from scalelong.monitor.curves import LEAST
from scalelong.monitor.snapshot import jumps, spread
from scalelong.runs.logs import Series, StabilityArrays
from scalelong.runs.resources import FORMAT as FORMAT_RESOURCES
from scalelong.runs.resources import ran_alone
from scalelong.runs.run import Run

FORMAT = 1
POINTS = 100  # of a stored curve
LAG = 0.05  # the EMA's validation loss may exceed the network's own by this share before it counts as lagging

# ----------------------------------------------------------------------------------------------------- measures


class Measure(NamedTuple):
    """A row of the table. `needs` names the field of `RunMeasures` that must be true of all runs in a ratio."""

    key: str
    title: str
    note: str
    needs: str | None = None


NO_RATIO = "difference"  # a measure that may be zero or negative: variants are compared by differences
MEASURES = (
    Measure("val_loss", "validation loss", "of the trained network at the end, on held-out images with fixed noise"),
    Measure("val_loss_ema", "validation loss (EMA)",
            "the same of the EMA network, which generates the samples; it lags behind early in a run"),
    Measure("frechet", "Fréchet distance", "of samples from the EMA network to the training data", "images"),
    Measure("on_the_way", "Fréchet distance by training", "the last that training itself measured (evaluate.every)",
            "images"),
    Measure("norm_outer", "norm, outer joins",
            "‖h_i‖ on training batches over the last tenth of training, where the outer half of the long skips joins "
            "(i ≤ N/2; geometric mean over i). The paper's Fig. 1 plots such a norm; it does not say of which layer"),
    Measure("norm_inner", "norm, inner joins",
            "the same for the inner half, i > N/2; i = N is the middle block's output"),
    Measure("growth_outer", "growth of the norm, outer joins",
            "p of norm ∝ step^p, fitted over the second half of training, mean over i ≤ N/2", NO_RATIO),
    Measure("growth_inner", "growth of the norm, inner joins", "the same for i > N/2", NO_RATIO),
    Measure("absolute_outer", "absolute oscillation, outer joins",
            "the band in Fig. 1: root mean square of ‖h_i‖ around its smoothed curve, on training batches in the "
            "second half of training (geometric mean over i ≤ N/2)"),
    Measure("absolute_inner", "absolute oscillation, inner joins", "the same for i > N/2"),
    Measure("feature_oscillation", "relative oscillation of features (ours)",
            "our own measure, not Fig. 1's: standard deviation of the jumps of log(norm) over one step, on a fixed "
            "probe batch, in the second half of training; mean over the features h_i that the long skips join"),
    Measure("middle_oscillation", "relative oscillation of the middle block (ours)",
            "the same of h_N alone, the middle block's output, which joins the innermost long skip"),
    Measure("gradient_oscillation", "relative oscillation of the gradient (ours)",
            "standard deviation of the jumps of log(gradient norm) between two training batches, before clipping, in "
            "the second half of training"),
    Measure("seconds", "time, s", "in training steps, without start-up, validation and sampling", "alone"),
    Measure("cpu_seconds", "CPU time, s", "of training with validation and sample grids", "alone"),
    Measure("memory", "peak memory, MiB",
            "of the process while it trains, without the preparation of data, or of the GPU if there is one"),
)  # fmt: skip
RESOURCES = ("seconds", "cpu_seconds", "memory")
MEANINGS = {
    "norm": "norm: ‖h_i‖ on training batches over the last tenth of training, where long skip i joins (outer: i ≤ "
    "N/2); the paper's Fig. 1 plots such a norm against steps. Growth: p of norm ∝ step^p over the second half",
    "absolute": "absolute oscillation: how far ‖h_i‖ scatters around its smoothed curve over the second half of "
    "training, the band in Fig. 1",
    "feature": "relative oscillation: how much log ‖h_i‖ changes in one step on a fixed probe batch, over the second "
    "half of training; our own measure, not Fig. 1's",
}
PARTS = ("backbone", "blocks")  # of `norms_of`: every h_i, every block
POINTWISE = ("norm", "growth", "absolute_oscillation", "relative_oscillation")
# Curves that fall as a run improves: a variant may reach the baseline's final value sooner.
CURVES = {"val_loss": "validation loss", "val_loss_ema": "validation loss (EMA)", "fid": "FID",
          "frechet": "Fréchet distance", "kid": "KID"}  # fmt: skip


@dataclass(frozen=True)
class RunMeasures:
    """The measures of one run, and the curves for accelerations.

    names   the full name of a measure whose kind the user chooses, such as the Fréchet distance
    alone   whether the run had the machine to itself, so that its times mean something
    images  whether its samples are images: nearer to the data than one constant image is
    norms   `norms_of` its stability log
    """

    variant: str
    seed: int
    folder: str
    values: dict[str, float]
    curves: dict[str, Series]
    names: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    images: bool = True
    norms: dict[str, Any] = field(default_factory=dict)


def measure_run(run: Run, variant: str, seed: int) -> RunMeasures:
    """Measure a run by the files in its folder. What they do not contain is left out."""
    evaluated, on_the_way = (stored_metrics(_current(run, origin)) for origin in ("compare", "train"))
    samples = {"frechet" if metric.name == "fid" else metric.name: metric for metric in evaluated}
    if on_the_way:
        samples["on_the_way"] = on_the_way[0]
    resources = run.resources if run.resources.get("format") == FORMAT_RESOURCES else {}
    memory = resources.get("peak_gpu_memory") or resources.get("peak_memory")
    values: dict[str, Any] = {
        **{key: run.column(key).final for key in ("val_loss", "val_loss_ema", "seconds")},
        **{key: metric.value for key, metric in samples.items()},
        **_oscillations(run),
        "cpu_seconds": resources.get("cpu_seconds"),
        "memory": memory / 2**20 if memory else None,
    }
    known = {key: float(v) for key, v in values.items() if isinstance(v, (int, float)) and np.isfinite(v)}
    curves = {key: run.column(key) for key in CURVES if len(run.column(key))}
    names = {key: metric.label for key, metric in samples.items()}
    images = all(metric.plausible for metric in samples.values())
    norms = {} if run.stability is None else norms_of(run.stability)
    return RunMeasures(variant, seed, str(run.folder), known, curves, names, ran_alone(resources), images, norms)


def _current(run: Run, origin: str) -> dict[str, Any] | None:
    """A stored evaluation of the run's last network; None if it is of an earlier step."""
    stored: dict[str, Any] | None = run.evaluations.get(origin)
    step = ((stored or {}).get("card", {}).get("generation") or {}).get("step")
    return stored if origin == "train" or step in (None, run.logged_step) else None


def late_oscillation(norms: Series) -> float | None:
    """The relative oscillation over the second half, of entries one step apart; None if there are too few."""
    if len(norms) < 4:
        return None
    late = norms.steps >= (norms.steps[0] + norms.steps[-1]) / 2
    values, one_step = norms.values[late].tolist(), torch.from_numpy(np.diff(norms.steps[late]) == 1)
    differences = torch.tensor(jumps(values[1:], values[:-1]), dtype=torch.float64)[one_step]
    value = float(spread(differences[:, None]))
    return value if math.isfinite(value) else None


def _oscillations(run: Run) -> dict[str, float | None]:
    """From the monitor's log, whose jumps span one step; without it, the gradient's if every step is logged."""
    log = run.stability
    if log is None:
        return {"gradient_oscillation": late_oscillation(run.column("grad_norm"))}
    gradient = {"gradient_oscillation": log.gradient_oscillation()}
    spreads = log.oscillation("probe", "backbone")
    if spreads is None:
        return gradient | norm_measures(log)
    return norm_measures(log) | {
        "feature_oscillation": float(np.nanmean(spreads)),
        "middle_oscillation": float(spreads[-1]),
        **gradient,
    }


def norm_measures(log: StabilityArrays) -> dict[str, float | None]:
    """Norm, growth and absolute oscillation of h_i on training batches, over the outer and over the inner joins."""
    curves = log.norms("train", "backbone")
    if curves is None:
        return {}
    measures: dict[str, float | None] = {}
    for side, joins in outer_and_inner(log.n).items():
        if not (columns := [i - 1 for i in joins]):  # one long skip has no outer half
            continue
        measures[f"norm_{side}"] = geometric_mean(curves.final[columns])
        measures[f"growth_{side}"] = float(np.mean(curves.growth[columns]))
        measures[f"absolute_{side}"] = geometric_mean(curves.band[columns])
    return measures


def norms_of(log: StabilityArrays) -> dict[str, Any]:
    """Norm, growth, absolute and relative oscillation of h_i (`backbone`), x_i (`skip`) and blocks.

    On training batches; the relative oscillation is the probe's. `backbone` also has its curve.
    """
    parts: dict[str, Any] = {"blocks_names": log.blocks}
    for name, width in (("backbone", log.n), ("skip", log.n), ("blocks", len(log.blocks))):
        curves = log.norms("train", name, width=width) if width else None
        if curves is None:
            continue
        relative = log.oscillation("probe", name, width=width)
        parts[name] = {
            "norm": rounded(curves.final), "growth": rounded(curves.growth),
            "absolute_oscillation": rounded(curves.band),
            "relative_oscillation": None if relative is None else rounded(relative),
        }  # fmt: skip
        if name == "backbone":
            rows = log.matrix("train", name, width=width)
            assert rows is not None
            keep = np.unique(np.linspace(0, len(rows) - 1, POINTS).round().astype(int))
            parts[name] |= {
                "steps": log.steps[keep].astype(int).tolist(),
                "smooth": [rounded(row) for row in curves.smooth[keep]], "raw": [rounded(row) for row in rows[keep]],
            }  # fmt: skip
    return parts


def rounded(values: Any) -> list[float | None]:
    """Five significant digits; None for what is not finite."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def outer_and_inner(n: int) -> dict[str, range]:
    """The joins i of N long skips in two halves: i ≤ N/2 and i > N/2."""
    return {"outer": range(1, n // 2 + 1), "inner": range(n // 2 + 1, n + 1)}


def geometric_mean(values: Any) -> float | None:
    """None where a value is missing or not positive."""
    array = np.asarray(values, dtype=float)
    return (
        float(np.exp(np.log(array).mean())) if array.size and (array > 0).all() and np.isfinite(array).all() else None
    )


# --------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Row:
    """One variant: means over its seeds; ratios, differences and accelerations against the baseline, paired by seed.

    The baseline itself has means alone. `differences` are of measures that may be zero or negative; `sooner` has one
    entry per logged curve.
    """

    variant: str
    means: dict[str, Estimate]
    ratios: dict[str, Estimate]
    differences: dict[str, Estimate]
    sooner: dict[str, Acceleration]


@dataclass(frozen=True)
class Comparison:
    """The result of `scalelong compare`, computed from finished runs; the first variant is the baseline."""

    runs: Sequence[RunMeasures]
    variants: Sequence[str]
    preset: str
    steps: int
    seeds: Sequence[int]
    missing: Sequence[str] = ()  # runs without a result, each with the reason
    unfinished: Sequence[str] = ()  # the names of their folders
    objective: str = "eps"  # what the networks predict
    failed: Collection[tuple[str, int]] = ()  # variant and seed of runs that became non-finite

    @property
    def baseline(self) -> str:
        return self.variants[0]

    @cached_property
    def loss(self) -> str:
        """The key of the validation loss that ranks variants, see `ranking_loss`."""
        return ranking_loss(self.runs)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        measures = self.measures()
        failed = {name: {seed for variant, seed in self.failed if variant == name} for name in self.variants}
        return tuple(_row(name, self.runs, self.baseline, measures, failed[name]) for name in self.variants)

    @property
    def complete(self) -> bool:
        return not self.missing

    def row(self, variant: str) -> Row:
        return next(row for row in self.rows if row.variant == variant)

    def measures(self) -> list[Measure]:
        """The measures that at least one run has, those of samples with their full names."""
        known = {key for run in self.runs for key in run.values}
        static = {measure.key for measure in MEASURES}
        others = [Measure(key, key, "of samples from the EMA network", "images") for key in sorted(known - static)]
        place = next(k for k, measure in enumerate(MEASURES) if measure.key == "frechet") + 1
        measures = []
        for measure in (*MEASURES[:place], *others, *MEASURES[place:]):
            names = {run.names[measure.key] for run in self.runs if measure.key in run.names}
            if measure.key not in known or (measure.key == "seconds" and not self.alone):
                continue
            if measure.key == "cpu_seconds" and not self.alone:
                measure = measure._replace(note=f"{measure.note}; the runs shared the machine, so it has no ratio")
            measures.append(measure._replace(title=names.pop()) if len(names) == 1 else measure)
        return measures

    @property
    def alone(self) -> bool:
        return all(run.alone for run in self.runs)

    def table(self) -> list[tuple[str, str, list[tuple[str, str]]]]:
        """Title, note and, for each variant, mean and change (as text, may be empty) of each row of the table."""
        table = []
        for key, title, note, _ in self.measures():
            means = [self._mean(row.means[key]) if key in row.means else "–" for row in self.rows]
            table.append((title, note, list(zip(means, (self._change(row, key) for row in self.rows), strict=True))))
        for key, title in CURVES.items():
            # Of the two validation losses, only the one that ranks.
            if any(key in row.sooner for row in self.rows) and key in (self.loss, "fid", "frechet", "kid"):
                cells = [row.sooner[key].texts if key in row.sooner else ("", "") for row in self.rows]
                table.append(("sooner", f"at the baseline's final {title}", cells))
        return table

    def _mean(self, mean: Estimate) -> str:
        """The mean with half the width of its interval, and the number of runs if some are missing."""
        return plus_minus(mean) + (f" (n = {mean.n})" if mean.n < len(self.seeds) else "")

    def _change(self, row: Row, key: str) -> str:
        """The ratio or difference to the baseline, and the number of pairs if some are missing; empty without one."""
        if (found := row.ratios.get(key) or row.differences.get(key)) is None:
            return ""
        text = change(found) if key in row.ratios else difference(found)
        return text + (f" (n = {found.n})" if found.n < len(self.seeds) else "")

    def pointwise(self, part: str, quantity: str) -> dict[str, list[Estimate | None]]:
        """variant → a quantity of `norms_of` at every h_i (part "backbone") or block ("blocks") against the baseline:
        its ratio, of growth the difference.
        """
        compare = paired_difference if quantity == "growth" else paired_ratio
        columns = {name: _columns(self.runs, name, part, quantity) for name in self.variants}
        base = columns.pop(self.baseline)
        table = {}
        for variant, own in columns.items():
            count = min((len(row) for row in (*own.values(), *base.values())), default=0)
            table[variant] = [
                compare(*({seed: row[k] for seed, row in side.items()} for side in (own, base))) for k in range(count)
            ]
        return {name: row for name, row in table.items() if any(row)}

    @property
    def meanings(self) -> list[str]:
        """What the three quantities of a norm mean, of those that were measured."""
        known = {key for run in self.runs for key in run.values}
        return [text for start, text in MEANINGS.items() if any(key.startswith(f"{start}_") for key in known)]

    @property
    def notes(self) -> list[str]:
        """What to know beside the numbers."""
        notes = []
        for key in ("frechet", "on_the_way"):
            names = sorted({run.names[key] for run in self.runs if key in run.names})
            if len(names) > 1:
                notes.append(f"the Fréchet distances are of different kinds and do not compare: {'; '.join(names)}")
        if any(row.sooner for row in self.rows):
            notes.append(
                f"sooner: the step at which {self.baseline} first reaches its own final value, divided by the step at "
                "which the variant reaches it (linear between two measurements), seed by seed"
            )
        if any("norm_outer" in run.values and "absolute_outer" not in run.values for run in self.runs):
            notes.append(
                f"absolute oscillation is not measured: it needs {LEAST} snapshots in the second half of training, so "
                "set monitor.every lower (1: at every step)"
            )
        if odd := sorted({run.variant for run in self.runs if not run.images}, key=list(self.variants).index):
            notes.append(
                f"samples of {', '.join(odd)} are farther from the data than one constant image: they are not images "
                "of it, and their distances are not compared"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {"variant": run.variant, "seed": run.seed, "folder": Path(run.folder).name, "values": run.values,
             "alone": run.alone, "images": run.images,
             "norms": {part: {key: own[key] for key in POINTWISE} for part, own in run.norms.items() if part in PARTS}}
            for run in self.runs
        ]  # fmt: skip
        return {
            "format": FORMAT, "preset": self.preset, "objective": self.objective, "steps": self.steps,
            "seeds": list(self.seeds), "baseline": self.baseline, "loss": self.loss, "complete": self.complete,
            "measures": {m.key: {"title": m.title, "note": m.note} for m in self.measures()},
            "rows": [asdict(row) for row in self.rows], "runs": runs, "missing": list(self.missing),
            "blocks": next((run.norms["blocks_names"] for run in self.runs if "blocks_names" in run.norms), []),
            "pointwise": {part: {key: self._listed(part, key) for key in POINTWISE} for part in PARTS},
            "unfinished": list(self.unfinished),
            "statistics": statistics_note(len(self.seeds)), "notes": self.notes,
        }  # fmt: skip

    def _listed(self, part: str, quantity: str) -> dict[str, list[dict[str, Any] | None]]:
        table = self.pointwise(part, quantity)
        return {name: [None if e is None else asdict(e) for e in row] for name, row in table.items()}

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")


def ranking_loss(runs: Sequence[RunMeasures]) -> str:
    """The key of the validation loss that ranks variants.

    `val_loss_ema`: the EMA network generates the samples and is less noisy. `val_loss` if the EMA still lags behind the
    network that it averages: its loss is more than LAG above the network's own in the mean over all runs.
    """
    pairs = [(run.values.get("val_loss_ema"), run.values.get("val_loss")) for run in runs]
    ratios = [ema / own for ema, own in pairs if ema is not None and own]
    return "val_loss_ema" if ratios and sum(ratios) / len(ratios) <= 1 + LAG else "val_loss"


def _row(
    variant: str, runs: Sequence[RunMeasures], baseline: str, measures: Sequence[Measure], failed: Collection[int]
) -> Row:
    own = [run for run in runs if run.variant == variant]
    base = [run for run in runs if run.variant == baseline] if variant != baseline else []
    row = Row(variant, {}, {}, {}, {})
    for measure in measures:
        key, needs = measure.key, measure.needs
        values, reference = ({r.seed: r.values[key] for r in side if key in r.values} for side in (own, base))
        if values:
            row.means[key] = mean_interval(list(values.values()))
        if needs == NO_RATIO:
            if (shift := paired_difference(values, reference)) is not None:
                row.differences[key] = shift
            continue
        meaningful = needs is None or all(getattr(run, needs) for run in (*own, *base))
        if meaningful and (ratio := paired_ratio(values, reference)) is not None:
            row.ratios[key] = ratio
    for key in CURVES:
        curves, targets = ({r.seed: r.curves[key] for r in side if key in r.curves} for side in (own, base))
        if (sooner := acceleration(curves, targets, failed)) is not None:
            row.sooner[key] = sooner
    return row


def _columns(runs: Sequence[RunMeasures], variant: str, part: str, quantity: str) -> dict[int, list[float]]:
    """seed → a quantity of `norms_of` at every point, of the variant's runs that have it; NaN where it is unknown."""
    found = {run.seed: run.norms.get(part, {}).get(quantity) for run in runs if run.variant == variant}
    return {seed: [math.nan if v is None else v for v in values] for seed, values in found.items() if values}
