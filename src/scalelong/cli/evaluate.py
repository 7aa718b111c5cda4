"""`scalelong evaluate`: FID and KID with their card, of a run or of any folder, and figures side by side."""

from __future__ import annotations

import atexit
import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scalelong.evaluation import Comparison, Evaluation, MetricValue


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]…", help="A run folder; with --compare, run folders or evaluation.json files."),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="A folder of images, or a dataset with its split, instead of a run.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="A folder of images, a dataset with its split and number of images (cifar10:test:10000), a file of "
            "statistics (.safetensors, or .npz with mu and sigma). Default: what the run was trained on."
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="How many images. Default: 10000 of a run, all of a folder.")
    ] = None,
    extractor: Annotated[
        str, typer.Option(help="inception gives FID; pixels (8×8 means) is cheap, and its distance is not FID.")
    ] = "inception",
    weights: Annotated[Path | None, typer.Option(help="A local file of the extractor's weights.")] = None,
    sampler: Annotated[str | None, typer.Option(help="The sampler. Default: the run's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Network evaluations an image.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Classifier-free guidance. Default: the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples: image k depends on (seed, k).")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images at a time.")] = 50,
    precision: Annotated[str, typer.Option(help="Of sampling: fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; by default the fastest there is.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Rank evaluations whose cards allow it.")] = False,
    vary: Annotated[
        str | None,
        typer.Option(help="With --compare: what the comparison is about; sampler, evaluations, guidance or ema."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write evaluation.json here too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure FID and KID, with the card that says what they can be compared with.

    Under torchrun or accelerate launch the processes share the images out, each of them counted once.

    Examples:

      scalelong evaluate runs/cifar10-tiny-cs-0.7-seed0 --n 10000

      scalelong evaluate --images samples/ --reference cifar10:train --json

      scalelong evaluate runs/a runs/b --compare
    """
    from scalelong.errors import ScaleLongError
    from scalelong.files import check_target

    targets = runs or []
    if compare:
        if images is not None or reference is not None:
            raise ScaleLongError("--compare reads evaluations that are there; leave out --images and --reference")
        _compare(targets, vary, json)
        return
    if vary is not None:
        raise ScaleLongError("--vary goes with --compare")
    if len(targets) != (1 if images is None else 0):
        raise ScaleLongError("give one run folder, or --images with --reference, or several runs with --compare")
    if batch_size < 1 or (n is not None and n < 1):
        raise ScaleLongError(f"--n and --batch-size are at least 1, not {n} and {batch_size}")
    if out is not None:
        check_target(out)
    device, first = _join(device)
    if images is not None:
        if reference is None:
            raise ScaleLongError("--images needs --reference: a folder, a dataset such as cifar10:train, or a file")
        if sampler or steps is not None or guidance is not None:
            raise ScaleLongError("--sampler, --steps and --guidance are for a run; --images are made already")
        evaluation = _of_images(images, reference, extractor, weights, n, batch_size, seed, device)
    else:
        options = _request(targets[0], n, sampler, steps, guidance, seed, batch_size, precision)
        evaluation = _of_run(targets[0], options, reference, extractor, weights, device)
    if not first:
        return
    if out is not None:
        evaluation.save(out)
    if json:
        typer.echo(json_module.dumps(evaluation.to_dict(), ensure_ascii=False))
    else:
        print_evaluation(evaluation)


def _of_images(
    images: str,
    reference: str,
    extractor: str,
    weights: Path | None,
    n: int | None,
    batch_size: int,
    seed: int,
    device: str | None,
) -> Evaluation:
    from scalelong.evaluation import evaluate_images
    from scalelong.evaluation.evaluate import dataset_name
    from scalelong.evaluation.images import FolderImages

    # A folder is looked into before minutes go into the reference.
    source: Any = images if dataset_name(images) else FolderImages(images)
    network = _on_device(extractor, weights, device)
    return evaluate_images(source, reference, network, n=n, batch_size=batch_size, seed=seed)


def _of_run(
    run: Path, request: Any, reference: str | None, extractor: str, weights: Path | None, device: str | None
) -> Evaluation:
    from scalelong.runs.generate import best_device
    from scalelong.runs.run import load_run

    trained = load_run(run)
    trained.net.to(best_device(device))
    return trained.evaluate(request, reference, _on_device(extractor, weights, device), save_as="evaluate")


def _request(
    run: Path,
    n: int | None,
    sampler: str | None,
    steps: int | None,
    guidance: float | None,
    seed: int,
    batch_size: int,
    precision: str,
) -> Any:
    from scalelong.diffusion import get_process
    from scalelong.diffusion.samplers import get_sampler
    from scalelong.runs.generate import Request, autocast_type
    from scalelong.runs.run import Run

    config = Run(run).config
    defaults = config.sample
    request = Request(
        n=10_000 if n is None else n,
        sampler=sampler or defaults.sampler,
        steps=steps if steps is not None or sampler is not None else defaults.steps,
        guidance=defaults.guidance if guidance is None else guidance,
        seed=seed,
        batch_size=batch_size,
        precision=precision,
    )
    # What is wrong is told now, not when the reference has been made.
    chosen = get_sampler(request.sampler)
    chosen.check(get_process(config.diffusion.process), chosen.evaluations(request.steps))
    autocast_type(precision)
    return request


def _join(device: str | None) -> tuple[str | None, bool]:
    """Join the other processes where there are any: this one's device, and whether it is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device, True
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    atexit.register(state.destroy_process_group)
    return str(state.device), bool(state.is_main_process)


def _on_device(extractor: str, weights: Path | None, device: str | None) -> Any:
    from scalelong.evaluation import build_extractor
    from scalelong.runs.generate import best_device

    here = best_device(device)  # before an extractor is fetched
    network: Any = build_extractor(extractor, weights)
    return network.to(here)


def _compare(targets: list[Path], vary: str | None, json: bool) -> None:
    from scalelong.evaluation import Evaluation, compare
    from scalelong.runs.run import EVALUATIONS

    files = {str(path): path / EVALUATIONS["evaluate"] if path.is_dir() else path for path in targets}
    evaluations = {name: Evaluation.load(path) for name, path in files.items()}
    varied = [word.strip() for word in (vary or "").split(",") if word.strip()]
    comparison = compare(evaluations, varied)
    if json:
        typer.echo(json_module.dumps(_comparison_json(comparison, evaluations), ensure_ascii=False))
    comparison.require()
    if not json:
        _print_comparison(comparison, evaluations)


def _comparison_json(comparison: Comparison, evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    return {
        "comparable": comparison.comparable,
        "ranking": [
            {"name": name, "fid": evaluations[name].fid, "frechet": evaluations[name].frechet}
            for name in comparison.ranking
        ],
        "differences": {difference.field: difference.values for difference in comparison.differences},
        "remarks": {difference.field: difference.values for difference in comparison.remarks},
        "overlapping": [list(pair) for pair in comparison.overlapping],
    }


def print_evaluation(evaluation: Evaluation) -> None:
    """The figures and the card as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    card, made = evaluation.card, evaluation.card.generation
    reference = card.reference
    split = f" ({reference.split})" if reference.split else ""
    of = f"{reference.n:,} images" if reference.n is not None else "an unknown number of images"
    rows = [(_label(name, evaluation), _figure(value)) for name, value in evaluation.values.items()]
    rows += [
        ("N", f"{card.n:,}"),
        ("images", f"{card.images}, {'×'.join(map(str, card.image))} [{card.content[:12]}]"),
        ("reference", f"{reference.name}{split}, {of} [{reference.content[:20]}]"),
        ("extractor", f"{card.extractor}, {card.width} features, weights {card.weights[:12]}"),
        ("resize", card.resize),
    ]
    known = {
        "sampler": made.sampler,
        "evaluations a sample": made.evaluations,
        "guidance": made.guidance,
        "EMA": made.ema,
        "seeds": None if made.sample_seed is None else f"{made.sample_seed} (samples), {made.train_seed} (training)",
        "effective batch": made.effective_batch,
        "checkpoint step": made.step,
    }
    rows += [(name, str(value)) for name, value in known.items() if value is not None]
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())))
    rows.append(("time", f"{card.seconds:,.0f} s in {card.processes} process(es), {card.created}"))
    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    console = Console(emoji=False)
    console.print(table)
    for note in card.notes:
        console.print(f"• {note}", highlight=False, markup=False)


def _label(name: str, evaluation: Evaluation) -> str:
    from scalelong.evaluation import METRICS

    return METRICS[name].label.format(extractor=evaluation.card.extractor) if name in METRICS else name


def _figure(metric: MetricValue) -> str:
    digits = ".4f" if abs(metric.value) >= 0.1 else ".3g"
    text = f"{metric.value:{digits}}"
    if metric.interval is not None:
        low_high = f"{metric.interval.low:{digits}} … {metric.interval.high:{digits}}"
        text += f" ({metric.interval.level:.0%} interval {low_high})"
    details = metric.details
    if "spread" in details:
        text += f" ± {details['spread']:.2g} over {details['subsets']} subsets of {details['subset_size']}"
    return text


def _print_comparison(comparison: Comparison, evaluations: dict[str, Evaluation]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(emoji=False)
    table = Table()
    metric = evaluations[comparison.ranking[0]].card.metric
    for column in ("", "evaluation", metric, "95% interval", "KID"):
        table.add_column(column, overflow="fold")
    for place, name in enumerate(comparison.ranking, start=1):
        found = evaluations[name]
        value, interval = found.values[comparison.metric].value, found.values[comparison.metric].interval
        between = f"{interval.low:.4f} … {interval.high:.4f}" if interval else ""
        kid = "" if found.kid is None else f"{found.kid:.3g}"
        table.add_row(str(place), escape(name), f"{value:.4f}", between, kid)
    console.print(table)
    for better, worse in comparison.overlapping:
        console.print(f"• the intervals of {better} and {worse} overlap: their order may be chance", markup=False)
    for remark in comparison.remarks:
        console.print(f"• they also differ in {remark}", markup=False, highlight=False)
