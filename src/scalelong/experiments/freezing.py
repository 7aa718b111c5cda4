"""`scalelong freeze`: a run trained with LS as a run with constants κ_i, and what the constants lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong._modules import evaluating
from scalelong.diffusion import simple_loss
from scalelong.errors import RunError
from scalelong.experiments.statistics import Estimate, mean_interval
from scalelong.models.registry import get_model
from scalelong.runs.run import Run, load_run
from scalelong.skips.distillation import Distillation, distill
from scalelong.training.examples import Batch, Examples
from scalelong.training.observers import held_out_examples


@dataclass(frozen=True)
class Frozen:
    """The new run, the distillation, and the change in held-out loss per image, paired by image, time and noise."""

    run: Run
    distillation: Distillation
    loss_before: float
    loss_change: Estimate

    def to_dict(self) -> dict[str, Any]:
        own = {"run": str(self.run.folder), "loss_before": self.loss_before, "loss_change": asdict(self.loss_change)}
        return self.distillation.to_dict() | own


def freeze(source: Path | str, out: Path | str | None = None, n: int = 256) -> Frozen:
    """Write a copy of a run whose LS is replaced by constants: `model/` and `config.json`, which load like any other.

    Args:
        source: A run trained with LS.
        out: Folder of the new run. Default: SOURCE-frozen.
        n: Images to average κ_i over (training split), and to measure the loss on (held-out split, if there is one),
            each at its own time.
    """
    run, target = load_run(source), Run(out or Path(source).with_name(Path(source).name + "-frozen"))
    config = run.config
    if not config.scaling.distills:
        raise RunError(f"{run.folder} was trained with {config.scaling}; freeze needs a run of scaling ls")
    if target.exists:
        raise RunError(f"{target.folder} is a run already; choose another --out")
    training = Examples(config, config.data.split)
    held_out, net = held_out_examples(config) or training, run.net
    before = _losses(run, held_out, n)
    denoise = get_model(config.model.kind).adapt(net)
    parts = _parts(training, n, config.train.batch_size)
    result = distill(net, [partial(_call, denoise, training, part) for part in parts])
    after = _losses(run, held_out, n)
    record = run.record | {"config": replace(config, scaling=result.scaling).to_dict(), "distilled_from": run.name}
    record["parameters"] = sum(p.numel() for p in net.parameters())
    with target.locked():
        target.write_record(record)
        target.save_model(net, run.step)
    changes = [a - b for a, b in zip(after, before, strict=True)]
    return Frozen(target, result, sum(before) / len(before), mean_interval(changes))


def _call(denoise: nn.Module, examples: Examples, part: Batch) -> Any:
    x_t = examples.process.add_noise(part.x_0, part.eps, part.t)
    return denoise(*examples.objective.network_inputs(x_t, part.t), y=part.y, context=part.context)


def _parts(examples: Examples, n: int, size: int) -> Iterator[Batch]:
    probe = examples.probe(n)
    for start in range(0, len(probe.x_0), size):
        yield probe.part(start, size)


def _losses(run: Run, examples: Examples, n: int) -> list[float]:
    """Return the loss of the network on each of `n` fixed images, times and noises."""
    denoise, values = get_model(run.config.model.kind).adapt(run.net), list[float]()
    with torch.no_grad(), evaluating(run.net):
        for part in _parts(examples, n, run.config.train.batch_size):
            values += simple_loss(denoise, examples.objective, **vars(part)).tolist()
    return values
