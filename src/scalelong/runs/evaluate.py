"""Evaluating what was trained: samples of a run's EMA network against its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from scalelong.evaluation.card import Generation
from scalelong.evaluation.evaluate import Evaluation, Extractor, as_reference, evaluate_images
from scalelong.evaluation.extractors import FeatureExtractor, build_extractor
from scalelong.evaluation.images import place
from scalelong.evaluation.reference import Reference, dataset_reference

if TYPE_CHECKING:
    import torch

    from scalelong.runs.config import Config
    from scalelong.training.examples import Facts
    from scalelong.runs.generate import Request

FILE = "evaluation.json"
FOLDER = "evaluations"  # of a run: one file a step


def evaluate_run(
    folder: Path | str,
    request: Request,
    reference: Any = None,
    extractor: Extractor = "inception",
    device: str | None = None,
) -> Evaluation:
    """Sample `request.n` images from a run's trained network, evaluate them, and write RUN/evaluation.json.

    `reference`: see `as_reference`; by default the data that the run was trained on.
    """
    from scalelong.runs.generate import best_device
    from scalelong.runs.run import load_run

    trained = load_run(folder)
    here = best_device(device)
    network = build_extractor(extractor)
    if isinstance(network, nn.Module):
        network.to(here)
    evaluation = evaluate_network(
        trained.net.to(here), trained.config, trained.facts, trained.step, request, reference, network, trained.run.name
    )
    if place()[0] == 0:
        evaluation.save(trained.run.folder / FILE)
    return evaluation


def evaluate_network(
    net: nn.Module,
    config: Config,
    facts: Facts,
    step: int,
    request: Request,
    reference: Any = None,
    extractor: Extractor = "inception",
    run: str | None = None,
) -> Evaluation:
    """Evaluate `request.n` samples of a network, as training does on its way. Several processes share them out."""
    from scalelong.diffusion.samplers import get_sampler
    from scalelong.runs.generate import generate

    network = build_extractor(extractor)
    target = as_reference(reference, network) if reference is not None else training_reference(config, network)
    rank, world = place()
    share = [len(range(other, request.n, world)) for other in range(world)]
    mine = replace(request, n=share[rank], first=request.first + sum(share[:rank]))
    return evaluate_images(
        generate(net, config, facts, mine),
        target,
        network,
        n=request.n,
        name=f"samples of {run}" if run else "samples",
        generation=Generation(
            sampler=request.sampler,
            evaluations=get_sampler(request.sampler).evaluations(request.steps),
            guidance=request.guidance,
            ema=config.ema.decay,
            sample_seed=request.seed,
            train_seed=config.seed,
            effective_batch=config.train.batch_size,
            step=step,
            run=run,
        ),
    )


def training_reference(config: Config, extractor: FeatureExtractor) -> Reference:
    """The statistics of the split that a config trains on, from the cache or computed now."""
    data = config.data
    return dataset_reference(data.name, data.split, extractor, image_size=data.image_size, skip_bad=data.skip_bad)


class TrainingEvaluation:
    """Evaluates a network every `config.evaluate.every` steps and at the end.

    The extractor and the reference are made here, once, so that what is wrong with them is said before training.
    Every process takes part: each samples its share.
    """

    def __init__(self, config: Config, folder: Path, device: str | torch.device = "cpu") -> None:
        self.config, self.folder = config, folder
        self.extractor = build_extractor(config.evaluate.extractor)
        if isinstance(self.extractor, nn.Module):
            self.extractor.to(device)
        self.reference = training_reference(config, self.extractor)

    def due(self, step: int, last: bool) -> bool:
        every = self.config.evaluate.every
        return every > 0 and (last or step % every == 0)

    def __call__(self, net: nn.Module, facts: Facts, step: int) -> dict[str, float]:
        """Write RUN/evaluations/step-….json and return the figures for the log."""
        from scalelong.runs.generate import Request

        sampling = self.config.sample
        request = Request(
            n=self.config.evaluate.n, sampler=sampling.sampler, steps=sampling.steps, guidance=sampling.guidance
        )
        name = self.folder.resolve().name
        found = evaluate_network(net, self.config, facts, step, request, self.reference, self.extractor, name)
        if place()[0] == 0:
            found.save(self.folder / FOLDER / f"step-{step:08d}.json")
        return figures(found)


def figures(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation in a line of the log: `fid` only where it is FID."""
    seen = {"fid" if evaluation.fid is not None else "frechet": evaluation.frechet}
    return seen if evaluation.kid is None else {**seen, "kid": evaluation.kid}
