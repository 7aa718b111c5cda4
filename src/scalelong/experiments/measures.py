"""What is measured of a run, read from its folder: nothing is trained or sampled here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.experiments.distance import read_distance, read_on_the_way
from scalelong.experiments.worker import read_resources
from scalelong.runs.logs import EMPTY, Series, read_columns
from scalelong.runs.watch_log import WatchLog, read_watch_log


@dataclass(frozen=True)
class Measure:
    """A column of the table. `lower` is better in all of them."""

    key: str
    title: str
    note: str


VAL_LOSS = Measure(
    "val_loss", "validation loss", "of the trained network at the end, on held-out images with fixed noise"
)
MEASURES = (
    VAL_LOSS,
    Measure(
        "val_loss_ema",
        "validation loss (EMA)",
        "the same of the EMA network, which one samples from; it lags behind early in a run",
    ),
    Measure("frechet", "Fréchet distance", "of samples from the EMA network to the training data"),
    Measure("on_the_way", "Fréchet distance by training", "the last that training itself measured (evaluate.every)"),
    Measure(
        "feature_oscillation",
        "feature oscillation",
        "standard deviation of the jumps of log(norm) over one step, on a fixed probe batch, in the second half of "
        "training: mean over the features h_i that the long skips join",
    ),
    Measure(
        "middle_oscillation",
        "middle block's oscillation",
        "the same of h_N alone, the middle block's output, which joins the innermost long skip",
    ),
    Measure(
        "gradient_oscillation",
        "gradient oscillation",
        "standard deviation of the jumps of log(gradient norm) between two training batches, before clipping, in the "
        "second half of training",
    ),
    Measure("seconds", "time, s", "spent in training steps, without start-up, validation and sampling"),
    Measure("cpu_seconds", "processor time, s", "of the whole process: start-up, validation and sample grids included"),
    Measure("memory", "peak memory, MiB", "of the process, or of the GPU where there is one"),
)
# Curves that fall as a run gets better: what a variant may reach sooner.
CURVES = {
    "val_loss": "validation loss",
    "val_loss_ema": "validation loss (EMA)",
    "fid": "FID",
    "frechet": "Fréchet distance",
}


@dataclass(frozen=True)
class RunMeasures:
    """The figures of one run, and the curves that others are timed against.

    `names`: the full name of a figure whose kind is the user's choice, such as the Fréchet distance.
    """

    variant: str
    seed: int
    folder: str
    values: dict[str, float]
    curves: dict[str, Series]
    names: dict[str, str] = field(default_factory=dict)


def measure_run(folder: Path, variant: str, seed: int) -> RunMeasures:
    """All that the folder tells; what it does not tell is left out."""
    return measure(
        variant,
        seed,
        folder,
        read_columns(folder / "metrics.jsonl"),
        read_watch_log(folder / "stability.jsonl"),
        {"frechet": read_distance(folder), "on_the_way": read_on_the_way(folder)},
        read_resources(folder),
    )


def measure(
    variant: str,
    seed: int,
    folder: Path,
    columns: Mapping[str, Series],
    watched: WatchLog | None,
    cards: Mapping[str, Mapping[str, Any] | None],
    resources: Mapping[str, Any],
) -> RunMeasures:
    """The figures of a run whose files have been read."""
    found: dict[str, Any] = {
        "val_loss": columns.get("val_loss", EMPTY).last,
        "val_loss_ema": columns.get("val_loss_ema", EMPTY).last,
        **{key: card.get("frechet") for key, card in cards.items() if card is not None},
        "seconds": columns.get("seconds", EMPTY).last,
        "cpu_seconds": resources.get("cpu_seconds"),
        "memory": _mebibytes(resources.get("peak_gpu_memory") or resources.get("peak_memory")),
        **_oscillations(watched, columns.get("grad_norm", EMPTY)),
    }
    values = {key: float(v) for key, v in found.items() if isinstance(v, (int, float)) and np.isfinite(v)}
    names = {
        key: str(card["card"].get("metric", "Fréchet distance")) for key, card in cards.items() if card is not None
    }
    curves = {key: columns[key] for key in CURVES if len(columns.get(key, EMPTY))}
    return RunMeasures(variant, seed, str(folder), values, curves, names)


def late_oscillation(norms: Series) -> float | None:
    """The standard deviation of differences of log(norm) between successive entries, over the second half."""
    if len(norms) < 4:
        return None
    late = norms.steps >= (norms.steps[0] + norms.steps[-1]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(norms.values[late])
    jumps = np.diff(logs)
    jumps = jumps[np.isfinite(jumps)]  # a norm of 0 or NaN leaves out the two differences it is part of
    return float(jumps.std()) if len(jumps) >= 2 else None


def _oscillations(watched: WatchLog | None, grad_norm: Series) -> dict[str, float | None]:
    """From the monitor's looks, whose jumps are over one step; without them the gradient's, between logged steps."""
    if watched is None:
        return {"gradient_oscillation": late_oscillation(grad_norm)}
    spreads = watched.oscillation("probe", "backbone")
    return {
        "feature_oscillation": None if spreads is None else float(np.nanmean(spreads)),
        "middle_oscillation": None if spreads is None else float(spreads[-1]),
        "gradient_oscillation": watched.gradient_oscillation(),
    }


def _mebibytes(size: float | None) -> float | None:
    return size / 2**20 if size else None
