"""What a comparison trains and measures: variants × seeds, each with a config and a run folder, validated first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelong.errors import InvalidValueError, RunError, invalid, unknown
from scalelong.runs.config import Config, differences, measured_differently
from scalelong.runs.run import Run
from scalelong.scaling import split_scalings
from scalelong.training.presets import choose

SCALINGS = "none,uniform,cs,ls"
MAX_SEEDS = 1000


@dataclass(frozen=True)
class DistanceSpec:
    """The Fréchet distance to measure of every run.

    Args:
        extractor: `inception` gives FID. `pixels` averages an image to 8×8, 64 numbers per channel, and costs almost
            nothing: it compares colors, layout and their correlations but no finer content. It is not FID. None takes
            the run's `evaluate.extractor`.
        n: Number of samples.
        evaluations: Network evaluations per sample; None takes the run's sampler setting.
    """

    extractor: str | None = "pixels"
    n: int = 256
    evaluations: int | None = None

    def __post_init__(self) -> None:
        from scalelong.evaluation.extractors import EXTRACTORS

        if self.extractor is not None and self.extractor not in EXTRACTORS:
            raise unknown("extractor", self.extractor, EXTRACTORS)
        if self.n < 2:
            raise invalid("n, the number of samples for the distance,", "an integer >= 2", self.n)
        if self.evaluations is not None and self.evaluations < 1:
            raise invalid("evaluations", "an integer >= 1", self.evaluations)


@dataclass(frozen=True)
class Variant:
    """A name and a config. Each seed makes one run of it."""

    name: str
    config: Config

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise invalid("the name of a variant", "letters, digits, dots, dashes and underscores", self.name)


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int
    config: Config
    folder: Path
    distance: DistanceSpec | None = None
    record: dict[str, Any] | None = None  # of a campaign: what its record says, and where it goes ("path")

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"


def scaling_variants(
    preset: str | Config = "digits",
    scalings: str = SCALINGS,
    *,
    kappa: float | None = None,
    steps: int | None = None,
    objective: str | None = None,
    settings: Sequence[str] = (),
) -> tuple[Variant, ...]:
    """One variant per scaling in a list such as `none,uniform,cs,cs:0.5`.

    Args:
        preset: Name of a preset, or the config to start from.
        scalings: Comma-separated NAME or NAME:VALUE (`explicit:1,0.7,0.5` too); the first is the baseline.
        kappa: κ of `cs` and `cs-reverse` entries that have none of their own.
        steps: Training steps of every run.
        objective: What every network predicts: eps, x0, v, flow or edm.
        settings: `KEY=VALUE` settings of every run.
    """
    if any(setting.partition("=")[0].strip() == "seed" for setting in settings):
        raise InvalidValueError("--set seed=… is not allowed in a comparison; choose the seeds with --seeds")
    variants = []
    for word in split_scalings(scalings):
        own = kappa if word.strip().lower() in ("cs", "cs-reverse") else None
        config = choose(preset, scaling=word, kappa=own, steps=steps, objective=objective, settings=list(settings))
        variants.append(Variant(config.scaling.label, config))
    return check_variants(variants)


def check_variants(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return `variants`; raise an error if there is none or two have the same name."""
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise invalid("scalings", f"one or more different variants, such as {SCALINGS}", ",".join(names))
    return tuple(variants)


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` → seeds 0, 1, 2; `4,7` or `4,` → exactly these."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words and all(word.isdecimal() and len(word) < 20 for word in words):
        seeds = tuple(dict.fromkeys(map(int, words)))
        if "," in text and max(seeds) < 2**63:
            return seeds
        if "," not in text and 1 <= seeds[0] <= MAX_SEEDS:
            return tuple(range(seeds[0]))
    raise invalid("--seeds", f"a number of seeds from 1 to {MAX_SEEDS}, or seeds below 2**63 such as 4,7", text)


def plan(
    variants: Sequence[Variant], seeds: Sequence[int], out: Path | str, distance: DistanceSpec | None = None
) -> tuple[Job, ...]:
    """All runs, in folders OUT/VARIANT-seedN. Seeds are the outer loop, so the first seeds are complete early."""
    check_variants(variants)
    if not seeds:
        raise invalid("seeds", "one or more seeds", tuple(seeds))
    jobs = tuple(
        Job(variant.name, seed, replace(variant.config, seed=seed), Path(out) / f"{variant.name}-seed{seed}", distance)
        for seed in seeds
        for variant in variants
    )
    for job in jobs:  # refuse a folder with another config now, not an hour later when its job starts
        run, steps = Run(job.folder), job.config.train.steps
        if run.exists and (changed := differences(run.config, job.config)):
            raise RunError(
                f"{run.folder} was started with other settings: {'; '.join(changed)}; use the same or another --out"
            )
        if run.exists and (reached := trained_steps(run)) > steps:
            raise RunError(
                f"{run.folder} already has {reached} steps, more than {steps}: use --steps {reached} or another --out"
            )
        if run.exists and (measures := measured_differently(run.config, job.config)):
            pairs = "; ".join(f"{key}: {before!r} → {now!r}" for key, (before, now) in measures.items())
            raise RunError(f"{run.folder} was measured with other settings: {pairs}; use the same or another --out")
    return jobs


def trained_steps(run: Run) -> int:
    """The step of the run's network, 0 if it has none yet."""
    try:
        return run.step
    except RunError:
        return 0
