"""What an item costs: training, evaluation, preparation and disk, from the model in docs/scale.md.

`python -m scalelong.paper.cost` prints the table of GPUs for that page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalelong.paper.items import Item
from scalelong.paper.study import Study
from scalelong.scaling import NoScaling

if TYPE_CHECKING:
    from scalelong.runs.config import Config

GPU = "A100, 312 TFLOP/s in bf16"
PEAK, UTILIZATION = 312e12, 0.35  # FLOP/s of one GPU, and the share that training and sampling reach
NODE, NVLINK, NETWORK = 8, 200e9, 20e9  # GPUs of a node; bytes/s of a ring in a node, and over one adapter per node
BUCKET = 25 << 20  # bytes: DDP's last bucket of gradients, which no computation hides
GPUS = (8, 16, 32, 64)
CORES = 2
INCEPTION, DECODER, ENCODER, CLIP = 11.4e9, 622e9, 273e9, 13.3e9  # FLOP per image of 299², 256², 256²; per caption
DECODE = 0.005  # core-seconds to read, crop and resize one image
CAPTIONS = 5  # per image
CHECKPOINT, NETWORK_FILE = 16, 4  # bytes per parameter: weights, average and two moments; a network alone
GB = 1e9


@dataclass(frozen=True)
class Step:
    """Seconds of one training step."""

    compute: float
    exchange: float  # of gradients, if nothing hid it
    exposed: float  # what backward does not hide

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def step_time(flop: float, parameters: float, gpus: int) -> Step:
    """Model a step of DDP: each GPU computes its share, and a ring reduces the float32 gradients during backward."""
    compute = flop / (gpus * PEAK * UTILIZATION)
    volume = 4 * parameters
    exchange = 2 * volume * (gpus - 1) / gpus / (NVLINK if gpus <= NODE else NETWORK)
    backward = 2 / 3 * compute
    return Step(compute, exchange, max(exchange - backward, exchange * min(1.0, BUCKET / volume)))


@dataclass(frozen=True)
class Cost:
    """The cost of all runs of a study. At CPU size `training` is in hours of one core and contains the evaluation."""

    runs: int
    batch: int
    flop: float  # per step of the unscaled network; scaling adds less than a thousandth
    parameters: int
    training: float  # hours of one GPU
    evaluation: float
    encoding: float  # by autoencoder and text encoder, once per dataset
    preparation: float  # hours of one core, once per dataset
    data: float  # bytes of prepared data
    disk: float  # bytes of run folders
    dataset: str


def cost_of(study: Study, size: str, gpus: int = 1) -> Cost:
    """Return what all runs of a study cost on `gpus` GPUs per run, or on a CPU."""
    from scalelong.training.presets import size_of

    config = study.config(NoScaling())
    network = size_of(config)
    runs, flop, parameters = len(study.scalings) * len(study.seeds), network["flop_per_step"], network["parameters"]
    if size == "cpu":
        training, evaluation = study.seconds, 0.0
    else:
        training = study.steps * gpus * step_time(flop, parameters, gpus).seconds
        evaluation = _evaluation_flop(study, config, flop / 3 / network["batch_size"]) / (PEAK * UTILIZATION)
    images, data, encoded = _data(config)
    checkpoints = min(config.checkpoint.keep, max(1, study.steps // config.checkpoint.every))
    networks = 1 + bool(config.evaluate.every and config.evaluate.keep_best)
    return Cost(
        runs=runs, batch=network["batch_size"], flop=flop, parameters=parameters, dataset=config.data.name,
        training=runs * training / 3600, evaluation=runs * evaluation / 3600,
        encoding=encoded / (PEAK * UTILIZATION) / 3600, preparation=images * DECODE / 3600, data=data,
        disk=runs * parameters * (CHECKPOINT * checkpoints + NETWORK_FILE * networks),
    )  # fmt: skip


def _evaluation_flop(study: Study, config: Config, forward: float) -> float:
    """FLOP of the samples of one run: FID at the end and during training, sample grids, and validation."""
    from scalelong.diffusion.samplers import get_sampler

    s, e, v, steps = config.sample, config.evaluate, config.validate, study.steps
    sample = forward * get_sampler(s.sampler).evaluations(s.steps) * (2 if s.guidance != 1 else 1)
    sample += DECODER if config.data.vae else 0.0
    final = 0 if study.distance is None else study.distance.n
    judged = final + (e.n * (steps // e.every) if e.every else 0)
    grids = s.n * (steps // s.every) if s.every else 0
    validated = 2 * v.n * (steps // v.every) if v.every else 0  # the network and its average
    return judged * (sample + INCEPTION) + grids * sample + validated * forward


def _data(config: Config) -> tuple[int, float, float]:
    """Return the images of a dataset, the bytes of their prepared form, and the FLOP of frozen encoders."""
    from scalelong.data import spec_of

    d, spec = config.data, spec_of(config.data.name)
    side = d.image_size or spec.image_size
    images = sum(max(counts) for counts in spec.counts.values())
    size, flop = images * spec.channels * side**2, 0.0
    if d.vae is not None:
        copies = 2 if d.flip else 1
        size += images * copies * 2 * 4 * (side // 8) ** 2 * 4  # float32 mean and deviation
        flop += images * copies * ENCODER
    if d.text is not None:
        from scalelong.training.presets import TEXT_WIDTHS

        size += images * CAPTIONS * (d.text_tokens or 0) * TEXT_WIDTHS[d.text] * 2  # float16
        flop += images * CAPTIONS * CLIP
    return images, float(size), flop


def minutes_on_two_cores(item: Item, studies: Sequence[Study] | None = None) -> float:
    """Estimate the minutes of a CPU item if nothing is trained yet; items that share runs take less."""
    return sum(len(s.scalings) * len(s.seeds) * s.seconds for s in studies or item.cpu) / 60 / CORES + item.minutes


def describe_cost(item: Item, studies: Sequence[Study], size: str, gpus: int = 1) -> list[str]:
    """Describe the cost: two lines per study, and the total."""
    costs = [cost_of(study, size, gpus) for study in studies]
    once = {cost.dataset: cost for cost in costs}.values()  # data is prepared once, whatever the number of studies
    lines = []
    for study, cost in zip(studies, costs, strict=True):
        amount = f"training {cost.training:,.0f} and evaluation {cost.evaluation:,.0f} GPU-hours"
        if size == "cpu":
            amount = f"{60 * cost.training:.0f} min of one core"
        lines.append(
            f"{study.name}: {cost.runs} runs × {study.steps:,} steps of {cost.batch} images, "
            f"{cost.flop / 1e12:.3g} TFLOP per step: {amount}; {_storage(cost.disk, [cost])}"
        )
        if size == "paper":
            hours, shares = zip(*(_on(cost, study.steps, count) for count in GPUS), strict=True)
            lines.append(
                f"  one run on {_words(GPUS)} GPUs: {_words(f'{h:,.1f}' for h in hours)} h, "
                f"of which {_words(f'{s:.0%}' for s in shares)} wait for gradients"
            )
    preparation = [
        f"preparation of {cost.dataset} {cost.preparation:,.1f} core-hours"
        + (f" and {cost.encoding:,.1f} GPU-hours" if cost.encoding else "")
        for cost in once
    ]
    if size == "paper":
        total = sum(cost.training + cost.evaluation for cost in costs)
        assumed = (
            f"{total:,.0f} GPU-hours on {gpus} {GPU} per run, at {UTILIZATION:.0%} utilization (docs/scale.md has the "
            "model). The paper's own 6.7 h for 200,000 steps of 32 CIFAR-10 images are about 6 % of the peak, so it "
            "may take several times as long"
        )
    else:
        minutes = minutes_on_two_cores(item, studies)
        assumed = f"about {minutes:.0f} min on {CORES} cores, including runs that items share"
    storage = _storage(sum(cost.disk for cost in costs), list(once))
    return [*lines, *preparation, f"total: {assumed}; {storage}"]


def _on(cost: Cost, steps: int, gpus: int) -> tuple[float, float]:
    """Hours of one run on `gpus` GPUs, and the share of a step in which it waits for gradients."""
    step = step_time(cost.flop, cost.parameters, gpus)
    return steps * step.seconds / 3600 + cost.evaluation / cost.runs / gpus, step.exposed / step.seconds


def _storage(runs: float, data: Sequence[Cost]) -> str:
    prepared = sum(cost.data for cost in data)
    total, own, shared = (_gigabytes(size) for size in (runs + prepared, runs, prepared))
    return f"disk {total} GB ({own} of runs, {shared} of data)"


def _gigabytes(size: float) -> str:
    return f"{size / GB:,.0f}" if size >= 10 * GB else f"{size / GB:.2g}"


def _words(values: object) -> str:
    return ", ".join(str(value) for value in values)  # type: ignore[attr-defined]


def table() -> str:
    """The table of docs/scale.md: hours of one run, and the share that waits for gradients."""
    from scalelong.paper.items import ITEMS

    studies = {study.preset: study for study in ITEMS["table-1"].paper}
    lines = [f"| preset | {' | '.join(f'{n} GPUs' for n in GPUS)} |", "|---|" + "---|" * len(GPUS)]
    for preset, study in studies.items():
        cells = [_on(cost_of(study, "paper"), study.steps, gpus) for gpus in GPUS]
        lines.append(f"| `{preset}` | " + " | ".join(f"{h:,.1f} h ({s:.0%})" for h, s in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
