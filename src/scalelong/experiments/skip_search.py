"""`scalelong tune-skips`: the ρ of Skip-Tuning, or b and s of FreeU, with the lowest KID, by halving over shared noise.

Image k of every candidate starts from the same noise. The rungs are numbers of images; the images of a rung fall into
BLOCKS blocks, and candidates are compared by the KID of each block, paired. What the search found is measured again on
new noise, because the lowest of several values is too low.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from scalelong.errors import EvaluationError, InvalidValueError, invalid, unknown
from scalelong.evaluation.extractors import FeatureExtractor
from scalelong.evaluation.kernel import kernel_distance
from scalelong.evaluation.reference import Reference
from scalelong.experiments.halving import Score, Tuned, halve, paired_differences
from scalelong.experiments.statistics import CONFIDENCE, Estimate
from scalelong.progress import track
from scalelong.runs.generate import Request
from scalelong.runs.run import Run
from scalelong.scaling import (
    FreeU,
    NoScaling,
    Scaling,
    SkipTuning,
    compose,
    parse_scaling,
    split_scalings,
)
from scalelong.skips import remove, scaling_of
from scalelong.skips.application import apply_quietly

Images = npt.NDArray[np.uint8]  # (n, h, w, c)
BLOCKS = 4
SMALLEST = 4 * BLOCKS  # images of a rung
REAL = 2000  # features of the reference, a random subset
SHOWN = 36  # images of each candidate that are kept for the sheet
RHOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2)
FREEU = tuple((b, s) for b in (1.05, 1.1, 1.2, 1.4) for s in (1.0, 0.9, 0.5))


def candidates_of(method: str, listed: str | None = None) -> dict[str, Scaling]:
    """Return the network as it is, and the settings of a method or those of a list such as `skip-tuning:0.8`."""
    if method not in ("skip-tuning", "freeu"):
        raise unknown("method", method, ("skip-tuning", "freeu"))
    if listed is not None:
        specs = [parse_scaling(word) for word in split_scalings(listed)]
    elif method == "skip-tuning":
        specs = [SkipTuning(rho) for rho in RHOS]
    else:
        specs = [FreeU(b, b, s, s) for b, s in FREEU]
    for spec in specs:
        if spec.phase != "inference":
            raise invalid("--candidates", "settings of skip-tuning or freeu, such as skip-tuning:0.8", spec.label)
    found = {spec.label: spec for spec in (NoScaling(), *specs)}
    if len(found) < 2:
        raise invalid("--candidates", "one or more settings", listed)
    return found


class Source(Protocol):
    """What draws images: image k depends on (seed, k) and on the scaling of `net`."""

    @property
    def name(self) -> str: ...
    @property
    def net(self) -> nn.Module: ...
    @property
    def placement(self) -> str: ...
    def images(self, first: int, count: int) -> Images: ...


@dataclass
class RunSource:
    """A run folder."""

    run: Run
    request: Request
    net: nn.Module

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def placement(self) -> str:
        return self.run.config.placement

    def images(self, first: int, count: int) -> Images:
        return np.concatenate(list(self.run.generate(replace(self.request, first=first, n=count), self.net)))


@dataclass
class PipelineSource:
    """A diffusers pipeline with `unet` or `transformer`; prompts and classes are used in turn."""

    pipe: Any
    name: str
    evaluations: int
    seed: int = 0
    batch_size: int = 16
    prompts: Sequence[str] = ()
    guidance: float | None = None
    placement: str = "join"

    def __post_init__(self) -> None:
        self.accepted = set(inspect.signature(self.pipe.__call__).parameters)
        if self.prompts and "prompt" not in self.accepted:
            raise InvalidValueError(f"{type(self.pipe).__name__} takes no prompt; leave out --prompt")
        self.pipe.set_progress_bar_config(disable=True)

    @property
    def net(self) -> nn.Module:
        found = getattr(self.pipe, "unet", None) or getattr(self.pipe, "transformer", None)
        if not isinstance(found, nn.Module):
            raise invalid("the pipeline", "one with a unet or a transformer", type(self.pipe).__name__)
        return found

    def images(self, first: int, count: int) -> Images:
        parts = []
        for start in range(first, first + count, self.batch_size):
            rows = range(start, min(start + self.batch_size, first + count))
            seeds = [(1_000_003 * self.seed + k) % 2**32 for k in rows]  # the CPU generator keeps 32 bits
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            options: dict[str, Any] = {"num_inference_steps": self.evaluations, "generator": generators}
            if self.prompts:
                options["prompt"] = [self.prompts[k % len(self.prompts)] for k in rows]
            elif (classes := self._classes()) and "class_labels" in self.accepted:
                options["class_labels"] = [k % classes for k in rows]
            if "batch_size" in self.accepted and not self.prompts:
                options["batch_size"] = len(rows)
            if self.guidance is not None and "guidance_scale" in self.accepted:
                options["guidance_scale"] = self.guidance
            images = np.asarray(self.pipe(**options, output_type="np").images)  # (B, h, w, c), 0 to 1
            parts.append((images * 255).round().clip(0, 255).astype(np.uint8))
        return np.concatenate(parts)

    def _classes(self) -> int:
        """The number of classes, without the label that means any."""
        config: Any = self.net.config
        rows = config.get("num_class_embeds") or config.get("num_classes") or 0
        names, null = self.pipe.config.get("class_names"), self.pipe.config.get("null_label")
        return len(names) if names else int(rows) - (null is not None)


@dataclass(frozen=True)
class SkipChoice:
    """The result of `search_skips`.

    result      of the search; losses are KID of blocks of images
    scaling     what to apply to the network at `placement`, its own scaling included
    before, after, change   KID of the network as it is, of the best setting, and their difference, on new noise
    """

    result: Tuned
    scaling: Scaling
    placement: str
    before: float
    after: float
    change: Estimate
    shown: dict[str, Images] = field(repr=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        fresh = {"before": self.before, "after": self.after, "change": asdict(self.change)}
        chosen = {"scaling": self.scaling.to_dict(), "placement": self.placement, "fresh": fresh}
        return {**asdict(self.result), "tied": list(self.result.tied), **chosen}


def search_skips(
    source: Source,
    candidates: dict[str, Scaling],
    reference: Reference,
    extractor: FeatureExtractor,
    *,
    samples: int = 512,
    placement: str | None = None,
    confidence: float = CONFIDENCE,
) -> SkipChoice:
    """Find the candidate whose images have the lowest KID to the reference. The network is left as it was.

    Args:
        samples: Images of a candidate that stays to the end; others stop after an eighth, a quarter or a half.
        placement: Where the setting acts, "join" or "after_norm". Default: where the network's own scaling acts.
    """
    if samples < 8 * SMALLEST:
        raise invalid("--samples", f"an integer >= {8 * SMALLEST}: {SMALLEST} images at the first rung", samples)
    if reference.features.kept is None:
        raise EvaluationError(f"KID needs the features of {reference.card.name}, which holds only mean and covariance")
    own, net, real = scaling_of(source.net), source.net.eval(), reference.features.kept[:REAL]
    if own is not None and own.scalars() is None:
        hint = "turn it into constants first (scalelong freeze RUN, scalelong.distill)"
        raise InvalidValueError(f"{source.name} is scaled with {own.spec}, which cannot be composed; {hint}")
    where = placement or (own.placement if own is not None else source.placement)
    features: dict[str, list[torch.Tensor]] = {name: [] for name in candidates}
    shown: dict[str, Images] = {}

    def put(spec: Scaling) -> None:
        if own is None and spec.is_identity:
            remove(net)
        else:
            apply_quietly(net, compose(own.spec, spec) if own is not None else spec, placement=where, replace=True)

    def extend(name: str, first: int, count: int) -> torch.Tensor:
        put(candidates[name])
        images = source.images(first, count)
        shown.setdefault(name, images[:SHOWN])
        return extractor(torch.from_numpy(images)).cpu()

    def blocks(rows: torch.Tensor) -> tuple[float, ...]:
        block = _blocks(len(rows))
        return tuple(kernel_distance(rows[block == b], real).value for b in range(BLOCKS))

    def advance(names: Sequence[str], count: int) -> dict[str, Score]:
        for name in track(list(names), f"{count} images of {len(names)} settings"):
            reached = sum(map(len, features[name]))
            features[name].append(extend(name, reached, count - reached))
        return {name: Score(blocks(torch.cat(features[name]))) for name in names}

    try:
        result = halve(list(candidates), advance, steps=samples, confidence=confidence)
        plain = next(iter(candidates))
        fresh = {name: extend(name, samples, samples) for name in dict.fromkeys((plain, result.best))}
        chosen = candidates[result.best]
        spec = chosen if own is None else compose(own.spec, chosen)
    finally:
        put(candidates[next(iter(candidates))])
    change = paired_differences({name: blocks(rows) for name, rows in fresh.items()}, plain, CONFIDENCE)[result.best]
    before, after = (kernel_distance(fresh[name], real).value for name in (plain, result.best))
    return SkipChoice(result, spec, where, before, after, change, shown)


def _blocks(count: int) -> torch.Tensor:
    """Return the block of every image: each of BLOCKS neighbours in another, at random, so that classes mix."""
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randperm(BLOCKS, generator=generator) for _ in range(-(-count // BLOCKS))]
    return torch.cat(groups)[:count]


def open_pipeline(name: str) -> Any:
    """Load a diffusers pipeline from a folder or the hub."""
    from diffusers import DiffusionPipeline

    from scalelong.files import read_json
    from scalelong.models.pipeline import ScaleLongPipeline

    index = read_json(Path(name) / "model_index.json") or {}
    own = index.get("_class_name") in ("ScaleLongPipeline", ["pipeline", "ScaleLongPipeline"])
    try:
        return (ScaleLongPipeline if own else DiffusionPipeline).from_pretrained(name)
    except OSError as error:
        raise InvalidValueError(f"{name} is neither a run folder nor a diffusers pipeline: {error}") from error


def sheet(choice: SkipChoice) -> tuple[Images, int]:
    """Return images of the network as it is (left) and of the best setting (right), and the number of columns."""
    names = (next(iter(choice.shown)), choice.result.best)
    before, after = (choice.shown[name] for name in names)
    across = int(min(len(before), len(after)) ** 0.5)
    rows, gap = [], np.full_like(before[:1], 128)
    for top in range(0, across * across, across):
        rows += [before[top : top + across], gap, after[top : top + across]]
    return np.concatenate(rows), 2 * across + 1
