"""A Fréchet distance for every run of a comparison: FID where it is asked for, else one that costs almost nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelong.errors import ScaleLongError, unknown

if TYPE_CHECKING:
    from scalelong.evaluation import Evaluation, FeatureExtractor

FILE = "distance.json"  # in the run folder, in evaluation.json's format
EXTRACTORS = ("pixels", "inception")


@dataclass(frozen=True)
class DistanceSpec:
    """Which features, of how many samples, made with how many evaluations of the network (None: the sampler's own).

    `pixels`: means over an 8×8 raster, 64 numbers a channel. No network sees them, so it says how far the samples'
    colours, layout and their correlations are from the data's, and nothing about finer content. It is not FID.
    """

    extractor: str = "pixels"
    n: int = 256
    evaluations: int | None = None

    def __post_init__(self) -> None:
        if self.extractor not in EXTRACTORS:
            raise unknown("extractor of the distance", self.extractor, EXTRACTORS)
        if self.n < 2:
            raise ScaleLongError(f"the distance needs at least 2 samples, not {self.n}")
        if self.evaluations is not None and self.evaluations < 1:
            raise ScaleLongError(f"the evaluations a sample are at least 1, not {self.evaluations}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_distance(folder: Path | str, spec: DistanceSpec) -> Evaluation:
    """Sample from a run's EMA network, measure against its training data, write RUN/distance.json."""
    from scalelong.runs.generate import Request, best_device
    from scalelong.runs.run import load_run

    trained = load_run(folder)
    sampling, device = trained.config.sample, best_device(None)
    request = Request(
        n=spec.n,
        sampler=sampling.sampler,
        steps=sampling.steps if spec.evaluations is None else spec.evaluations,
        guidance=sampling.guidance,
        batch_size=min(spec.n, 256),
    )
    return trained.evaluate(request, extractor=build(spec.extractor), net=trained.net.to(device), save_as="compare")


def build(name: str) -> FeatureExtractor:
    """The extractor by name, on the fastest device."""
    from scalelong.evaluation import build_extractor
    from scalelong.runs.generate import best_device

    network: Any = build_extractor(name)
    return network.to(best_device(None))


def read_distance(folder: Path) -> dict[str, Any] | None:
    """What RUN/distance.json holds, or None."""
    return read_card(folder / FILE)


def read_on_the_way(folder: Path) -> dict[str, Any] | None:
    """The newest evaluation that training itself made (evaluate.every), or None."""
    files = sorted((folder / "evaluations").glob("step-*.json"))
    return read_card(files[-1]) if files else None


def read_card(path: Path) -> dict[str, Any] | None:
    """An evaluation as it is written, or None where it is not there or not one."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) and isinstance(facts["card"], dict) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def is_measured(folder: Path, spec: DistanceSpec, step: int) -> bool:
    """Whether distance.json is of this step and these samples."""
    facts = read_distance(folder)
    if facts is None:
        return False
    card = facts["card"]
    made = card.get("generation") or {}
    name = "8×8 pixels" if spec.extractor == "pixels" else spec.extractor
    same_extractor = card.get("extractor") == name or (spec.extractor == "inception" and card.get("metric") == "FID")
    same_evaluations = spec.evaluations is None or made.get("evaluations") == spec.evaluations
    return bool(same_extractor and same_evaluations and card.get("n") == spec.n and made.get("step") == step)
