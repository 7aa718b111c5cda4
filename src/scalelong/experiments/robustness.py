"""The robustness of a trained run (the paper's Section 3.3, Fig. 3c): extra noise at the input, and Theorem 3.4.

Three views of one question, how far the output moves when the input does: predictions and losses at x_t + δ on held-out
images, the Fréchet distance of samples whose every evaluation of the network sees x + δ, and the local Lipschitz
constant beside the theorem's bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.files import write_text
from scalelong.progress import track
from scalelong.robustness.local_lipschitz import LocalLipschitz, local_lipschitz
from scalelong.robustness.sensitivity import Sensitivity, measure_sensitivity

if TYPE_CHECKING:
    from scalelong.evaluation import FeatureExtractor
    from scalelong.runs.run import Run
    from scalelong.training.examples import Batch

FILE, FORMAT = "robustness.json", 1
VARIANCES = (0.003, 0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Distance:
    """The Fréchet distance of samples made with extra noise of this variance at every evaluation of the network."""

    variance: float
    value: float
    low: float | None  # a 95 % interval over the samples
    high: float | None


@dataclass(frozen=True)
class Robustness:
    """What `scalelong robustness` measures. `edges` are of the timestep bins, in the process's own time."""

    run: str
    step: int
    scaling: dict[str, Any]
    images: int
    seed: int
    edges: tuple[float, ...]
    sensitivity: tuple[Sensitivity, ...]  # the first of them without extra noise
    lipschitz: tuple[LocalLipschitz, ...]  # one a bin
    points: int  # inputs a bin behind `lipschitz`
    distances: tuple[Distance, ...] = ()
    metric: str | None = None  # what the distance is, in words
    samples: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; docs/monitor.md has the format."""
        values = {"format": FORMAT, **asdict(self)}
        for one, row in zip(self.lipschitz, values["lipschitz"], strict=True):
            row |= {"m0": one.m0, "exceeded": one.exceeded}
        finite: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda constant: None)
        return finite


def measure_run(
    trained: Run,
    *,
    variances: Sequence[float] = VARIANCES,
    images: int = 128,
    draws: int = 4,
    bins: int = 5,
    points: int = 2,
    samples: int = 256,
    extractor: FeatureExtractor | None = None,
    seed: int = 0,
) -> Robustness:
    """Measure a run's EMA network on held-out images; `extractor` None or `samples` 0 leaves the distances out."""
    from scalelong.diffusion.network import Denoiser
    from scalelong.process import get_process

    counts = {
        "images": (images, 1),
        "draws": (draws, 1),
        "bins": (bins, 1),
        "points": (points, 0),
        "samples": (samples, 0),
    }
    for name, (value, least) in counts.items():
        if value < least:
            raise ScaleLongError(f"{name} is at least {least}, not {value}")
    chosen = tuple(sorted({0.0, *(float(v) for v in variances)}))
    process, net = get_process(trained.config.diffusion.process), trained.net.eval()
    batch, split = _held_out(trained, images)
    edges = tuple(process.t_max * k / bins for k in range(bins + 1))
    conditions = {k: v for k, v in {"y": batch.y, "context": batch.context}.items() if v is not None}
    sensitivity = measure_sensitivity(
        Denoiser(net), process, batch.x_0, batch.t, batch.eps, conditions,
        variances=chosen, edges=edges, draws=draws, seed=seed,
    )  # fmt: skip
    lipschitz = tuple(_lipschitz(trained, batch, edges, points, seed)) if points else ()
    distances: tuple[Distance, ...] = ()
    metric = None
    if extractor is not None and samples:
        distances, metric = _distances(trained, chosen, samples, extractor, seed)
    return Robustness(
        run=trained.name, step=trained.step, scaling=trained.config.scaling.to_dict(), images=len(batch.x_0), seed=seed,
        edges=edges, sensitivity=tuple(sensitivity), lipschitz=lipschitz, points=points, distances=distances,
        metric=metric, samples=samples if distances else 0,
        notes=(f"images of the {split} split", *dict.fromkeys(one.note for one in lipschitz if one.note)),
    )  # fmt: skip


def save(result: Robustness, path: Path | str) -> None:
    """Write robustness.json, whole or not at all."""
    write_text(path, json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class Perturbed(nn.Module):
    """A network that sees x + δ, δ ~ N(0, σ_δ²·I) drawn anew at every evaluation from a generator of its own."""

    def __init__(self, net: nn.Module, variance: float, seed: int) -> None:
        super().__init__()
        self.module = net  # the name under which a wrapped network is looked for
        self.deviation = variance**0.5
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        delta = self.deviation * torch.randn(x.shape, generator=self.generator)
        return self.module(x + delta.to(x), *args, **kwargs)


def _held_out(trained: Run, images: int) -> tuple[Batch, str]:
    """A fixed batch of the validation split, or of the training split where there is none."""
    from scalelong.training.examples import Examples

    config = trained.config
    try:
        return Examples(config, config.data.validation).probe(images), config.data.validation
    except ScaleLongError:
        return Examples(config, config.data.split).probe(images), config.data.split


def _lipschitz(trained: Run, batch: Batch, edges: Sequence[float], points: int, seed: int) -> list[LocalLipschitz]:
    """At the first `points` inputs, their times moved to the middle of each bin."""
    from scalelong.diffusion.network import Denoiser
    from scalelong.process import get_process

    process, part = get_process(trained.config.diffusion.process), batch.part(0, points)
    conditions = Denoiser(trained.net).arguments(part.y, part.context)
    found = []
    for low, high in track(list(pairwise(edges)), "Lipschitz constants"):
        t = torch.full_like(part.t, (low + high) / 2)
        x_t = process.add_noise(part.x_0, part.eps, t)
        found.append(local_lipschitz(trained.net, x_t, process.network_time(t), seed=seed, **conditions))
    return found


def _distances(
    trained: Run, variances: Sequence[float], samples: int, extractor: FeatureExtractor, seed: int
) -> tuple[tuple[Distance, ...], str]:
    from scalelong.runs.evaluate import evaluate_network
    from scalelong.runs.generate import Request

    config, found, metric = trained.config, [], ""
    request = Request(
        n=samples, sampler=config.sample.sampler, steps=config.sample.steps, guidance=config.sample.guidance,
        seed=seed, batch_size=min(samples, 256),
    )  # fmt: skip
    for variance in track(variances, "samples with extra noise"):
        net = Perturbed(trained.net, variance, seed)
        evaluation = evaluate_network(net, config, trained.facts, trained.step, request, extractor=extractor)
        frechet, metric = next(iter(evaluation.values.values())), evaluation.card.metric
        ends = (None, None) if frechet.interval is None else (frechet.interval.low, frechet.interval.high)
        found.append(Distance(variance, frechet.value, *ends))
    return tuple(found), metric
