"""Evaluate a network with the settings of its run: once, or regularly while it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from scalelong.diffusion.samplers import get_sampler
from scalelong.evaluation.card import Generation
from scalelong.evaluation.evaluate import Evaluation, as_reference, evaluate_images
from scalelong.evaluation.extractors import Extractor, FeatureExtractor, build_extractor
from scalelong.evaluation.images import rank_and_world
from scalelong.evaluation.reference import Reference, dataset_reference
from scalelong.runs.config import Config, Facts
from scalelong.runs.generate import Request, generate

if TYPE_CHECKING:
    import torch


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
    """Evaluate `request.n` samples of a network. Each of several processes samples its share.

    reference: see `as_reference`; None means the data the run was trained on.
    """
    network = build_extractor(extractor)
    target = as_reference(reference, network) if reference is not None else training_reference(config, network)
    rank, world = rank_and_world()
    shares = [len(range(other, request.n, world)) for other in range(world)]
    own = replace(request, n=shares[rank], first=request.first + sum(shares[:rank]))
    return evaluate_images(
        generate(net, config, facts, own),
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
    """Return the statistics of the training split, from the cache or computed now."""
    data = config.data
    return dataset_reference(data.name, data.split, extractor, image_size=data.image_size, skip_bad=data.skip_bad)


class TrainingEvaluation:
    """Evaluates the EMA network every `config.evaluate.every` steps and after the last, as the paper's FID-10k curves.

    Builds extractor and reference once, so that a problem with them shows before training starts.
    Every process takes part.
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
        """Write RUN/evaluations/step-….json and return the values to log."""
        s = self.config.sample
        request = Request(n=self.config.evaluate.n, sampler=s.sampler, steps=s.steps, guidance=s.guidance)
        name = self.folder.resolve().name
        result = evaluate_network(net, self.config, facts, step, request, self.reference, self.extractor, name)
        if rank_and_world()[0] == 0:
            result.save(self.folder / "evaluations" / f"step-{step:08d}.json")
        return {metric: value.value for metric, value in result.values.items()}
