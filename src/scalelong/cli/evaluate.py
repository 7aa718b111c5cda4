"""`scalelong evaluate`: metrics of a run or of any images with their card, and comparisons of evaluations."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from scalelong.cli import _names as names
from scalelong.cli import _shared as shared

if TYPE_CHECKING:
    from scalelong.evaluation import Evaluation, MetricValue


def evaluate(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN",
            help="A run folder; with --compare, run folders or evaluation.json files.",
            autocompletion=names.complete_run,
        ),
    ] = None,
    images: Annotated[
        str | None, Option(help="A folder of images or a dataset such as cifar10:test, instead of a run.")
    ] = None,
    reference: Annotated[
        str | None,
        Option(
            help="A folder of images, a dataset with split and number of images (cifar10:test:10000), or a file of "
            "statistics (.safetensors, or .npz with mu and sigma). Default: the run's training data."
        ),
    ] = None,
    n: Annotated[
        int | None, Option("--n", "-n", help="Number of images. Default: 10000 for a run, all of a folder.")
    ] = None,
    metrics: Annotated[
        str | None,
        Option(
            help=f"Names out of {', '.join(names.METRICS)}. Default: fid (or frechet) and kid. With --compare: the one "
            "that ranks.",
            autocompletion=names.one_of(names.METRICS),
        ),
    ] = None,
    extractor: Annotated[
        str | None,
        Option(help=f"{shared.EXTRACTOR_HELP} Default: the run's.", autocompletion=names.one_of(names.EXTRACTORS)),
    ] = None,
    weights: shared.Weights = None,
    dinov2: Annotated[
        str | None, Option(help="DINOv2 for fd-dinov2: a folder, Meta's .pth or a hub name (SCALELONG_DINOV2).")
    ] = None,
    clip_model: Annotated[
        str | None,
        Option("--clip-model", help="CLIP for cmmd and clip-score: a folder or a hub name (SCALELONG_CLIP)."),
    ] = None,
    reference_extractor: Annotated[
        str | None, Option(help="What a .npz reference was computed with: inception or inception-pytorch-fid.")
    ] = None,
    step: Annotated[
        str | None, Option(help="The checkpoint of a run: a step, or best (evaluate.keep_best). Default: the last.")
    ] = None,
    labels: Annotated[
        str | None,
        Option(help="Labels of the samples: balanced, or by frequency in the training data. Default: the run's."),
    ] = None,
    memorisation: Annotated[
        bool, Option("--memorisation", help="Also compare samples with their nearest training images.")
    ] = False,
    sampler: shared.Sampler = None,
    steps: shared.SamplerSteps = None,
    guidance: shared.Guidance = None,
    clip: shared.Clip = None,
    seed: Annotated[int, Option(help="Seed of the samples: image k depends on (seed, k).")] = 0,
    batch_size: shared.BatchSize = 50,
    precision: shared.Precision = "auto",
    device: shared.Device = None,
    compare: Annotated[bool, Option("--compare", help="Rank evaluations whose cards agree.")] = False,
    vary: Annotated[
        str | None, Option(help="With --compare: card fields that may differ, such as sampler or evaluations.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Also write the evaluation to this file; only there if the run is read-only.")
    ] = None,
    json: shared.Json = False,
) -> None:
    """Compute FID, KID and other metrics with the card that says what they can be compared with.

    Under torchrun or accelerate launch the processes share the images.

    Examples:

      scalelong evaluate runs/cifar10-tiny-cs-0.7-seed0 --n 10000

      scalelong evaluate --images samples/ --reference cifar10:train --json

      scalelong evaluate runs/a --metrics fid,kid,precision,recall,mind --step best

      scalelong evaluate runs/a runs/b --compare
    """
    from scalelong.errors import InvalidValueError
    from scalelong.files import check_target
    from scalelong.runs.locate import locate
    from scalelong.runs.run import Run, load_run

    shared.check_sampling(sampler, precision, extractor)
    wanted = None if metrics is None else shared.comma_words(metrics)
    names.check_name("labels", labels, ("balanced", "frequency"))
    runs = [locate(run) for run in runs or []]
    if compare and (images is not None or reference is not None):
        raise InvalidValueError("--compare reads stored evaluations; leave out --images and --reference")
    if vary is not None and not compare:
        raise InvalidValueError(f"--vary {vary} needs --compare")
    if compare:
        _compare(runs, shared.comma_words(vary or ""), json, wanted)
        return
    if len(runs) != (1 if images is None else 0):
        raise InvalidValueError("expected one run folder, or --images with --reference, or several runs with --compare")
    if images is not None and reference is None:
        raise InvalidValueError("--images needs --reference: a folder, a dataset such as cifar10:train, or a file")
    if images is not None and (sampler or steps is not None or guidance is not None or clip is not None):
        raise InvalidValueError("--sampler, --steps, --guidance and --clip apply to a run, not to --images")
    if images is not None and (step is not None or labels is not None or memorisation):
        raise InvalidValueError("--step, --labels and --memorisation apply to a run, not to --images")
    shared.check_counts(n=n, batch_size=batch_size)
    if out is not None:
        check_target(out)
    config = Run(runs[0]).config if images is None else None
    writable = all(os.access(run, os.W_OK) for run in runs)
    if not writable and (out is None or memorisation):
        raise InvalidValueError(f"{runs[0]} is read-only; give --out FILE, and leave out --memorisation")

    from scalelong.evaluation import build_extractor, evaluate_images, read_reference
    from scalelong.evaluation.images import FolderImages
    from scalelong.evaluation.metrics import by_extractor
    from scalelong.evaluation.sources import check_counts, dataset_name
    from scalelong.runs.generate import best_device, evaluation_draws
    from scalelong.training.parallel import join_processes

    # Check everything that is cheap to check before downloading weights or computing features.
    source: Any = images if images is None or dataset_name(images) else FolderImages(images)
    n = 10_000 if n is None and images is None else n
    options: dict[str, Any] = {"sampler": sampler, "steps": steps, "guidance": guidance, "precision": precision}
    options["clip_denoised"] = clip
    request = None
    if config is not None:
        assert n is not None
        draws = {**evaluation_draws(config), **({} if labels is None else {"labels": labels})}
        request = shared.sampling_request(config, **options, **draws, n=n, seed=seed, batch_size=batch_size)
        extractor = extractor or config.evaluate.extractor
    target_reference: Any = reference
    if reference_extractor is not None:
        if reference is None or not reference.endswith(".npz"):
            raise InvalidValueError(
                "--reference-extractor states what a .npz was computed with; give one as --reference"
            )
        target_reference = read_reference(reference, reference_extractor)
    check_counts(source, target_reference, n, wanted)
    device, first = join_processes(device)
    target = best_device(device)
    chosen, others = extractor or "inception", {"dinov2": dinov2, "clip": clip_model}
    groups = by_extractor(wanted, chosen)
    run = None if request is None else load_run(runs[0])
    at = int(step) if step is not None and step.isdecimal() else step
    built = {key: build_extractor(key or chosen, weights if key is None else others[key]) for key in groups}
    for network in built.values():
        network.to(target)  # type: ignore[attr-defined]
    main: Any = built.pop(None, chosen)
    given: dict[str, Any] = {"metrics": wanted, "extractors": built}
    if run is None or request is None:
        evaluation = evaluate_images(source, target_reference, main, n=n, batch_size=batch_size, seed=seed, **given)
    else:
        run.net.to(target)
        stored = "evaluate" if writable else None
        evaluation = run.evaluate(request, target_reference, main, step=at, save_as=stored, **given)
    if not first:
        return
    if out is not None:
        evaluation.save(out)
    found = None
    if memorisation and run is not None and request is not None:
        found = run.memorisation(replace(request, n=min(request.n, 1000)), main, at)
    if json:
        shared.echo_json({**evaluation.to_dict(), **({} if found is None else {"memorisation": found.to_dict()})})
    else:
        _print(evaluation)
    if found is not None and not json:
        shared.print_lines([str(found), f"the ten nearest pairs: {runs[0] / 'memorisation.png'}"], "• ")


def _print(evaluation: Evaluation) -> None:
    from scalelong.evaluation import METRICS

    card, generation, reference = evaluation.card, evaluation.card.generation, evaluation.card.reference
    count = f"{reference.n:,} images" if reference.n is not None else "an unknown number of images"
    rows = [
        (METRICS[name].label.format(extractor=card.extractor) if name in METRICS else name, _value(value))
        for name, value in evaluation.values.items()
    ]
    seeds = f"{generation.sample_seed} (samples), {generation.train_seed} (training)"
    known = {
        "N": f"{card.n:,}",
        "images": f"{card.images}, {'×'.join(map(str, card.image))} [{card.content[:12]}]",
        "reference": f"{reference.title}, {count} [{reference.content[:20]}]",
        "extractor": f"{card.extractor}, {card.width} features, weights {card.weights[:12]}",
        "resize": card.resize,
        **{
            f"extractor of {metric}": f"{one.extractor}, {one.width} features, weights {one.weights[:12]}, {one.resize}"
            for metric, one in card.metrics.items()
            if one.extractor != card.extractor
        },
        "reference from": reference.source,
        "objective": generation.objective,
        "sampler": generation.sampler,
        "evaluations per sample": generation.evaluations,
        "guidance": generation.guidance,
        "labels": generation.labels,
        "autoencoder": generation.autoencoder,
        "clipped predictions": {None: None, True: "yes", False: "no"}[generation.clip_denoised],
        "out of range": None if generation.far_share is None else f"{generation.far_share:.1%} before the final clamp",
        "EMA": generation.ema,
        "seeds": None if generation.sample_seed is None else seeds,
        "effective batch": generation.effective_batch,
        "checkpoint step": generation.step,
        "selected": generation.selection and f"{generation.selection}, best of {generation.minimum_over} evaluations",
        "versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
        "time": f"{card.seconds:,.0f} s in {card.processes} process(es), {card.created}",
    }
    rows += [(name, str(value)) for name, value in known.items() if value is not None]
    shared.print_table("", (), rows)
    shared.print_lines(card.notes, "• ")


def _value(metric: MetricValue) -> str:
    """Format a metric with its interval and spread."""
    digits = ".4f" if abs(metric.value) >= 0.1 else ".3g"
    text = f"{metric.value:{digits}}"
    if (interval := metric.interval) is not None:
        text += f" ({interval.level:.0%} interval {interval.low:{digits}} … {interval.high:{digits}})"
    if "spread" in (details := metric.details):
        text += f" ± {details['spread']:.2g} over {details['subsets']} subsets of {details['subset_size']}"
    return text


def _compare(paths: list[Path], vary: list[str], json: bool, metrics: list[str] | None) -> None:
    """Rank stored evaluations, or raise with the fields in which their cards differ."""
    from scalelong.errors import InvalidValueError
    from scalelong.evaluation import METRICS, Evaluation, compare
    from scalelong.runs.run import EVALUATIONS

    if metrics is not None and len(metrics) != 1:
        raise InvalidValueError(f"--compare ranks by one metric, got {', '.join(metrics) or 'none'}")
    files = {str(path): path / EVALUATIONS["evaluate"] if path.is_dir() else path for path in paths}
    evaluations = {name: Evaluation.load(path) for name, path in files.items()}
    comparison = compare(evaluations, vary, metrics[0] if metrics else None)
    ranked = [(name, evaluations[name]) for name in comparison.ranking]
    if json:
        shared.echo_json({
            "comparable": comparison.comparable,
            "ranking": [{"name": name, "fid": one.fid, "frechet": one.frechet} for name, one in ranked],
            "differences": comparison.differences,
            "remarks": comparison.remarks,
            "overlapping": comparison.overlapping,
        })  # fmt: skip
    comparison.require()
    if json:
        return
    rows = []
    for rank, (name, one) in enumerate(ranked, start=1):
        value = one.values[comparison.metric]
        interval = f"{value.interval.low:.4f} … {value.interval.high:.4f}" if value.interval else ""
        rows.append((str(rank), name, f"{value.value:.4f}", interval, "" if one.kid is None else f"{one.kid:.3g}"))
    metric, card = comparison.metric, ranked[0][1].card
    label = METRICS[metric].label.format(extractor=card.extractor) if metrics and metric in METRICS else card.metric
    shared.print_table("", ("", "evaluation", label, "95% interval", "KID"), rows, left=2)
    remarks = [f"the intervals of {a} and {b} overlap: their order may be chance" for a, b in comparison.overlapping]
    for field, values in comparison.remarks.items():
        remarks.append(
            f"they also differ in {field} ({', '.join(f'{value} in {name}' for name, value in values.items())})"
        )
    shared.print_lines(remarks, "• ")
