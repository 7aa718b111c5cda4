"""What a comparison trains: variants × seeds, each a config and a run folder, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scalelong.errors import ScaleLongError
from scalelong.experiments.distance import DistanceSpec
from scalelong.runs.config import Config, differences
from scalelong.training.presets import choose

SCALINGS = "none,uniform,cs,ls"
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Variant:
    """One thing compared: a config, of which every seed makes a run."""

    name: str
    config: Config

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ScaleLongError(f"a variant's name has letters, digits, dots and dashes, not {self.name!r}")


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int
    config: Config
    folder: Path
    distance: DistanceSpec | None = None

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"


def scaling_variants(
    preset: str = "digits",
    scalings: str = SCALINGS,
    *,
    kappa: float | None = None,
    steps: int | None = None,
    settings: Sequence[str] = (),
) -> tuple[Variant, ...]:
    """A variant for each of `none,uniform,cs,cs:0.5,…`: NAME or NAME:κ. `kappa` is for those of CS that name none."""
    if any(setting.partition("=")[0].strip() == "seed" for setting in settings):
        raise ScaleLongError("--set seed=…: a comparison takes its seeds from --seeds")
    variants = []
    for word in [part.strip() for part in scalings.split(",") if part.strip()]:
        name, colon, number = word.partition(":")
        own = _number(word, number) if colon else kappa if name in ("cs", "cs-reverse") else None
        if colon and name not in ("uniform", "cs", "cs-reverse"):
            raise ScaleLongError(f"scaling {word!r}: a κ goes with uniform, cs and cs-reverse, not with {name!r}")
        config = choose(preset, scaling=name, kappa=own, steps=steps, settings=list(settings))
        variants.append(Variant(config.scaling.label, config))
    return checked(variants)


def checked(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """At least one, and no name twice."""
    if not variants:
        raise ScaleLongError(f"a comparison needs at least one scaling, such as {SCALINGS}")
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ScaleLongError(f"{', '.join(twice)} is named twice")
    return tuple(variants)


def parse_seeds(words: str) -> tuple[int, ...]:
    """`3` → seeds 0, 1, 2; `4,7` or `4,` → these."""
    text = words.strip()
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise ScaleLongError(f"--seeds is a number of seeds, or seeds with commas between them, not {words!r}")
    numbers = [int(part) for part in parts]
    if "," in text:
        if max(numbers) >= 2**63:
            raise ScaleLongError(f"a seed is less than 2**63, not {max(numbers)}")
        return tuple(dict.fromkeys(numbers))
    if not 1 <= numbers[0] <= MOST_SEEDS:
        raise ScaleLongError(f"--seeds is 1 … {MOST_SEEDS}, or the seeds themselves (4,7), not {numbers[0]}")
    return tuple(range(numbers[0]))


def plan(
    variants: Sequence[Variant], seeds: Sequence[int], out: Path | str, distance: DistanceSpec | None = None
) -> tuple[Job, ...]:
    """Every run, seed by seed so that whole seeds are there early, in folders OUT/VARIANT-seedN."""
    checked(variants)
    if not seeds:
        raise ScaleLongError("a comparison needs at least one seed")
    jobs = []
    for seed in seeds:
        for variant in variants:
            config = replace(variant.config, seed=seed)
            jobs.append(Job(variant.name, seed, config, Path(out) / f"{variant.name}-seed{seed}", distance))
    for job in jobs:
        _check_folder(job)
    return tuple(jobs)


def _check_folder(job: Job) -> None:
    """A folder of another config is refused now, not by one job an hour later."""
    from scalelong.runs.run import Run

    run = Run(job.folder)
    if not run.exists:
        return
    changed = differences(run.config, job.config)
    if changed:
        raise ScaleLongError(
            f"{job.folder} was started with other settings: {'; '.join(changed)}. Give the same ones, or another --out"
        )
    try:
        reached = run.step
    except ScaleLongError:
        return
    if reached > job.config.train.steps:
        raise ScaleLongError(
            f"{job.folder} has {reached} steps already, more than {job.config.train.steps}: "
            f"give --steps {reached} or more, or another --out"
        )


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ScaleLongError(f"scaling {word!r}: {text!r} is not a number") from None
