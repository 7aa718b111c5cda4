"""The robustness of a trained run (Section 3.3, Fig. 3c): how far the output moves when the input is perturbed.

Three measurements: predictions and losses at x_t + δ on held-out images; the Fréchet distance of samples when every
network evaluation sees x + δ; the local Lipschitz constant beside Theorem 3.4's bound.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from scalelong.diffusion.network import Denoiser, make_conditions
from scalelong.errors import ScaleLongError, invalid
from scalelong.files import write_text
from scalelong.progress import track
from scalelong.robustness import LocalLipschitz, Sensitivity, local_lipschitz, measure_sensitivity
from scalelong.runs.generate import best_device, evaluation_request
from scalelong.training.examples import Batch, Examples

if TYPE_CHECKING:
    from scalelong.evaluation import FeatureExtractor
    from scalelong.runs.run import Run

FILE, FORMAT = "robustness.json", 1
VARIANCES = (0.003, 0.01, 0.03, 0.1, 0.3)


class Words(NamedTuple):
    """Symbols of a network's target, output and input under an objective, and what the target is."""

    target: str
    output: str
    input: str
    meaning: str


WORDS = {
    "eps": Words("ε", "ε̂", "x_t", "the noise that made x_t"),
    "x0": Words("x_0", "x̂_0", "x_t", "the image"),
    "v": Words("v", "v̂", "x_t", "v = α·ε − σ·x_0"),
    "flow": Words("F", "F̂", "x_t", "F = dx_t/dt"),
    "edm": Words("F", "F̂", "c_in·x_t", "F, the preconditioned image"),
}


@dataclass(frozen=True)
class Distance:
    """The Fréchet distance of samples with extra noise of this variance at every network evaluation."""

    variance: float
    value: float
    low: float | None  # 95 % interval over the samples
    high: float | None


@dataclass(frozen=True)
class Robustness:
    """The result of `scalelong robustness`. `edges` bound the timestep bins, in the process's own time."""

    run: str
    step: int
    scaling: dict[str, Any]
    objective: str
    images: int
    seed: int
    edges: tuple[float, ...]
    sensitivity: tuple[Sensitivity, ...]  # the first without extra noise
    lipschitz: tuple[LocalLipschitz, ...]  # one per bin
    points: int  # inputs per bin for `lipschitz`
    distances: tuple[Distance, ...] = ()
    metric: str | None = None  # full name of the distance
    samples: int = 0
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> Words:
        return WORDS[self.objective]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; docs/monitor.md has the format."""
        values = {"format": FORMAT, **asdict(self)}
        for one, row in zip(self.lipschitz, values["lipschitz"], strict=True):
            row |= {"m0": one.m0, "exceeded": one.exceeded}
        finite: dict[str, Any] = json.loads(json.dumps(values), parse_constant=lambda constant: None)
        return finite

    def save(self, path: Path | str) -> None:
        """Write robustness.json atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def measure_run_robustness(
    run: Run,
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
    """Measure the robustness of a run's EMA network.

    Args:
        run: A trained run.
        variances: σ_δ² of the extra noise; 0 is added.
        images: Held-out images for predictions and losses.
        draws: Draws of δ per image.
        bins: Timestep bins.
        points: Inputs per bin for the Lipschitz constant; 0 leaves it out.
        samples: Samples per Fréchet distance; 0 leaves it out.
        extractor: Features of the distance; None leaves it out.
        seed: Of δ and of the samples.
    """
    for name, value, least in [("images", images, 1), ("draws", draws, 1), ("bins", bins, 1), ("points", points, 0),
                               ("samples", samples, 0)]:  # fmt: skip
        if value < least:
            raise invalid(name, f"an integer >= {least}", value)
    variances = sorted({0.0, *map(float, variances)})
    objective, device = run.objective, best_device()
    net = run.net.to(device).eval()
    batch, split = _held_out(run, images)
    batch = batch.to(device)
    edges = tuple(objective.process.t_max * k / bins for k in range(bins + 1))
    sensitivity = measure_sensitivity(
        Denoiser(net), objective, batch.x_0, batch.t, batch.eps, make_conditions(batch.y, batch.context),
        variances=variances, edges=edges, draws=draws, seed=seed,
    )  # fmt: skip
    lipschitz = _lipschitz(run, batch.part(0, points), edges, seed) if points else []
    distances: list[Distance] = []
    metric = None
    if extractor is not None and samples:
        distances, metric = _distances(run, variances, samples, extractor, seed)
    return Robustness(
        run=run.name, step=run.step, scaling=run.config.scaling.to_dict(),
        objective=objective.name, images=len(batch.x_0), seed=seed,
        edges=edges, sensitivity=tuple(sensitivity), lipschitz=tuple(lipschitz), points=min(points, len(batch.x_0)),
        distances=tuple(distances), metric=metric, samples=samples if distances else 0,
        notes=(f"images of the {split} split", *dict.fromkeys(one.note for one in lipschitz if one.note)),
    )  # fmt: skip


class Perturbed(nn.Module):
    """A network that sees x + δ; each evaluation draws δ ~ N(0, σ_δ²·I) from a generator of its own.

    Guidance evaluates every sample twice, in the two halves of a batch. Both see the same δ: it is noise of the sample,
    and the difference of the halves must not amplify it.
    """

    def __init__(self, net: nn.Module, variance: float, seed: int) -> None:
        super().__init__()
        self.module = net  # the attribute under which `Denoiser` finds a wrapped network
        self.deviation = variance**0.5
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        copies = 2 if len(x) % 2 == 0 and torch.equal(*x.chunk(2)) else 1  # two independent samples are never equal
        delta = self.deviation * torch.randn((len(x) // copies, *x.shape[1:]), generator=self.generator)
        delta = torch.cat([delta] * copies)
        return self.module(x + delta.to(x), *args, **kwargs)


def _held_out(run: Run, images: int) -> tuple[Batch, str]:
    """A fixed batch of the validation split, or of the training split if the data have no other."""
    data = run.config.data
    try:
        return Examples(run.config, data.validation).probe(images), data.validation
    except ScaleLongError:
        return Examples(run.config, data.split).probe(images), data.split


def _lipschitz(run: Run, batch: Batch, edges: Sequence[float], seed: int) -> list[LocalLipschitz]:
    """The constants at the inputs of `batch`, with their times moved to the middle of each bin."""
    objective = run.objective
    conditions: dict[str, Any] = {**Denoiser(run.net).arguments(batch.y, batch.context)}
    constants = []
    for low, high in track(list(pairwise(edges)), "Lipschitz constants"):
        t = torch.full_like(batch.t, (low + high) / 2)
        x, time = objective.network_inputs(objective.process.add_noise(batch.x_0, batch.eps, t), t)
        constants.append(local_lipschitz(run.net, x, time, seed=seed, **conditions))
    return constants


def _distances(
    run: Run, variances: Sequence[float], samples: int, extractor: FeatureExtractor, seed: int
) -> tuple[list[Distance], str]:
    distances, metric = [], ""
    request = evaluation_request(run.config, samples, seed=seed)
    for variance in track(variances, "samples with extra noise"):
        evaluation = run.evaluate(request, extractor=extractor, net=Perturbed(run.net, variance, seed))
        frechet, metric = next(iter(evaluation.values.values())), evaluation.card.metric
        ends = (None, None) if frechet.interval is None else (frechet.interval.low, frechet.interval.high)
        distances.append(Distance(variance, frechet.value, *ends))
    return distances, metric
