"""Evaluation on the way through a training run: samples of the EMA network, as the paper's FID-10k curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from scalelong.evaluation.evaluate import Evaluation
from scalelong.evaluation.extractors import build_extractor
from scalelong.evaluation.images import place
from scalelong.runs.evaluate import evaluate_network, training_reference

if TYPE_CHECKING:
    import torch

    from scalelong.runs.config import Config
    from scalelong.training.examples import Facts

FOLDER = "evaluations"  # of a run: one file a step


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
