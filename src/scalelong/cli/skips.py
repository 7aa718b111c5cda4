"""`scalelong tune-skips` and `scalelong freeze`: the long skips of a trained network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from scalelong._text import number, with_interval
from scalelong.cli import _names as names
from scalelong.cli import _shared as shared

if TYPE_CHECKING:
    from scalelong.experiments.skip_search import SkipChoice, Source

COLUMNS = ("setting", "images", "KID", "more than the best by", "")


def tune_skips(
    target: Annotated[
        str,
        Argument(metavar="RUN|PIPELINE", help="A run folder, digits, or a diffusers pipeline: a folder or a hub name."),
    ],
    reference: Annotated[
        str | None,
        Option(help="Images to be close to: a dataset (cifar10, cifar10:test) or a folder. Default: the run's data."),
    ] = None,
    method: Annotated[str, Option(help="skip-tuning searches ρ, freeu searches b and s.")] = "skip-tuning",
    candidates: Annotated[
        str | None,
        Option(help="Settings instead of the method's own: skip-tuning:0.7,skip-tuning:0.9 or freeu:1.2,1.2,0.9,0.9."),
    ] = None,
    samples: Annotated[int, Option(help="Images of a setting that stays to the end.")] = 512,
    evaluations: Annotated[
        int | None, Option(help="Network evaluations per image. Default: the run's; 20 for a pipeline.")
    ] = None,
    sampler: shared.Sampler = None,
    guidance: shared.Guidance = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt for a pipeline of text; repeatable, in turn.")] = None,
    placement: Annotated[
        str | None, Option(help="Where it acts: join or after_norm. Default: that of the network's scaling.")
    ] = None,
    extractor: shared.Extractor = "inception",
    weights: shared.Weights = None,
    seed: Annotated[int, Option(help="Seed of the noise: image k of every setting has the same.")] = 0,
    batch_size: shared.BatchSize = 50,
    device: shared.Device = None,
    confidence: Annotated[float, Option(help="Probability with which the best setting survives.")] = 0.95,
    out: Annotated[Path | None, Option(help="Folder of page, figures and scaling. Default: RUN/tune-skips.")] = None,
    json: shared.Json = False,
) -> None:
    """Find the ρ of Skip-Tuning, or b and s of FreeU, with the lowest KID at a number of network evaluations.

    No training. All settings start from the same noise, and those that are worse stop early. The best one is measured
    again on new noise beside the network as it is, and both are shown side by side.

    Examples:

      scalelong tune-skips runs/cifar10 --evaluations 10

      scalelong tune-skips runs/digits --method freeu --extractor pixels --samples 256

      scalelong tune-skips google/ddpm-cifar10-32 --reference cifar10 --evaluations 20
    """
    from scalelong.errors import invalid

    shared.check_counts(evaluations=evaluations, batch_size=batch_size)
    names.check_name("extractor", extractor, names.EXTRACTORS)
    names.check_name("placement", placement, ("join", "after_norm"))
    if not 0 < confidence < 1:
        raise invalid("--confidence", "in (0, 1)", confidence)
    from scalelong.evaluation.extractors import build_extractor
    from scalelong.evaluation.sources import as_reference
    from scalelong.experiments.skip_search import PipelineSource, RunSource, candidates_of, open_pipeline, search_skips
    from scalelong.runs.generate import best_device
    from scalelong.runs.locate import locate
    from scalelong.runs.run import Run, load_run, reference_images

    target = str(locate(target))
    listed, on = candidates_of(method, candidates), best_device(device)
    source: Source
    images: Any = reference
    path = locate(target)
    if Run(path).exists and not (path / "model_index.json").is_file():  # which model/ of a run has
        run = load_run(path)
        request = shared.sampling_request(
            run.config, sampler=sampler, steps=evaluations, guidance=guidance, precision="auto", seed=seed,
            batch_size=batch_size, prompts=prompt or None,
        )  # fmt: skip
        source, images = RunSource(run, request, run.net.to(on)), reference or reference_images(run.config)
    else:
        if reference is None:
            raise invalid("--reference", "given for a pipeline: a dataset or a folder of images", None)
        if sampler is not None:
            raise invalid("--sampler", "left out for a pipeline, which has a scheduler of its own", sampler)
        pipe = open_pipeline(target).to(on)
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "guidance": guidance}
        source = PipelineSource(pipe, Path(target).name, evaluations or 20, prompts=prompt or (), **options)
    features: Any = build_extractor(extractor, weights)
    features = features.to(on)
    choice = search_skips(
        source, listed, as_reference(images, features), features, samples=samples, placement=placement,
        confidence=confidence,
    )  # fmt: skip
    folder = out or (path if Path(target).is_dir() else Path("runs")) / "tune-skips"
    page = _write(choice, source, folder, f"KID of {extractor}")
    if json:
        shared.echo_json({**choice.to_dict(), "page": str(page)})
        return
    shared.print_table(f"{source.name}: KID of {extractor}", COLUMNS, _rows(choice), left=1)
    keep = choice.result.best == "none" or _is_worse(choice)
    advice = [] if keep else [f"apply it: {_apply(choice)}"]
    shared.print_lines([*_verdicts(choice), *advice, f"page: {page}"])


def _rows(choice: SkipChoice) -> list[list[str]]:
    rows, result = [], choice.result
    for s in result.standings:
        gap = "" if s.worse_by is None else with_interval(s.worse_by.mean, s.worse_by.low, s.worse_by.high, 3)
        why = s.dropped.replace("step", "image") or ("best" if s.name == result.best else "")
        rows.append([s.name, f"{s.steps:,}", number(s.loss), gap, why])
    return rows


def _is_worse(choice: SkipChoice) -> bool:
    """Whether the best setting of the search raises KID on new noise by more than chance."""
    return choice.change.low is not None and choice.change.low > 0


def _verdicts(choice: SkipChoice) -> list[str]:
    result, change = choice.result, choice.change
    if result.best == "none":
        return [f"no setting has a lower KID than the network as it is ({number(choice.before)} on new noise)"]
    text = with_interval(change.mean, change.low, change.high, 3)
    lines = [f"on new noise: KID {number(choice.before)} as it is, {number(choice.after)} with {result.best}: {text}"]
    if _is_worse(choice):
        lines.append("worse on new noise: keep the network as it is")
    elif change.high is None or change.high >= 0:
        lines.append("no difference worth choosing: the interval includes zero")
    return [*lines, *([f"no difference worth choosing to {', '.join(result.tied)}"] if result.tied else [])]


def _apply(choice: SkipChoice) -> str:
    where = "" if choice.placement == "join" else f", placement={choice.placement!r}"
    spec = choice.scaling
    text = f"scalelong.parse_scaling({spec.to_dict()!r})" if spec.kind == "compose" else f"scalelong.{spec!r}"
    return f"scalelong.apply(net, {text}{where}, replace=True)"


def _write(choice: SkipChoice, source: Source, folder: Path, kid: str) -> Path:
    """Write the sheet, the figure, the scaling and the page."""
    import json

    from scalelong.data.images import save_grid
    from scalelong.experiments.skip_search import sheet
    from scalelong.files import write_text
    from scalelong.report.figures import draw_rungs, save_figure
    from scalelong.report.findings import Findings
    from scalelong.report.page import Choice, write_choice

    folder.mkdir(parents=True, exist_ok=True)
    images, columns = sheet(choice)
    save_grid(images, folder / "sheet.png", columns)
    save_figure(draw_rungs(choice.result, f"{kid} of the blocks, mean", "images", "KID"), folder / "kid.png")
    write_text(folder / "tune-skips.json", json.dumps(choice.to_dict(), indent=1) + "\n")
    pictures = {
        f"Left: the network as it is; right: {choice.result.best}; the same noise.": folder / "sheet.png",
        "Left: KID at every rung. Right: paired differences with their intervals.": folder / "kid.png",
    }
    summary = Findings(
        f"{choice.result.best} has the lowest KID of {len(choice.result.standings)}", tuple(_verdicts(choice))
    )
    facts = ["scalelong tune-skips", source.name, kid]
    page = Choice(summary, facts, COLUMNS, _rows(choice), _apply(choice), pictures)
    return write_choice(page, folder / "report.html")


def freeze(
    run: shared.RunFolder,
    out: Annotated[Path | None, Option(help="Folder of the new run. Default: RUN-frozen.")] = None,
    n: Annotated[int, Option("--n", "-n", help="Images to average κ_i over, and to measure the loss on.")] = 256,
    json: shared.Json = False,
) -> None:
    """Turn the κ_i that LS learned, averaged over data and time, into constants: a new run that loads like any other.

    Prints the spread of κ_i that is lost, and the change in held-out loss.

    Example: scalelong freeze runs/digits-ls-seed0
    """
    from scalelong.experiments.freezing import freeze as freeze_run

    shared.check_counts(n=n)
    frozen = freeze_run(run, out, n)
    if json:
        shared.echo_json(frozen.to_dict())
        return
    rows = [
        [str(s.index), number(s.coefficient), number(s.spread, 3), number(s.spread_over_inputs, 3),
         f"{s.low:.3g} … {s.high:.3g}"]
        for s in frozen.distillation.skips
    ]  # fmt: skip
    shared.print_table(f"{run}: κ_i of LS over {n} images", ("i", "mean", "spread", "over inputs", "range"), rows)
    change, before = frozen.loss_change, frozen.loss_before
    text = with_interval(change.mean, change.low, change.high, 3)
    shared.print_lines([f"held-out loss {number(before)}, change {text} ({change.mean / before:+.2%})",
                        f"new run: {frozen.run.folder} ({frozen.distillation.scaling.word})"])  # fmt: skip
