"""`scalelong train`, `sample`, `compare` and `report`: make runs, sample from them, compare and show them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from scalelong.cli import _names as names
from scalelong.cli import _shared as shared

if TYPE_CHECKING:
    from scalelong.runs import Config


def train(
    preset: shared.PresetName = None,
    config: shared.ConfigFile = None,
    scaling: Annotated[
        str | None,
        Option(
            help="none, uniform, cs, cs-reverse, ls, norm, mp, gate, lerp, sparse, stable or rezero; cs:0.5 sets κ, "
            "auto chooses it, explicit:1,0.7,0.5 sets κ_1…κ_N. Default: the preset's.",
            autocompletion=names.complete_scaling,
        ),
    ] = None,
    kappa: Annotated[float | None, Option(help="κ of cs, cs-reverse and uniform.")] = None,
    objective: shared.Objective = None,
    data: shared.DataName = None,
    image_size: shared.ImageSize = None,
    channels: shared.Channels = None,
    background: shared.Background = None,
    holdout: shared.Holdout = None,
    skip_bad: shared.SkipBad = False,
    steps: Annotated[int | None, Option(help="Total number of steps.")] = None,
    batch_size: Annotated[int | None, Option(help="Images per step over all processes.")] = None,
    seed: Annotated[int | None, Option(help="Seed of weights, data order and noise.")] = None,
    out: Annotated[Path | None, Option(help="The run folder. Default: runs/PRESET-SCALING-seedN.")] = None,
    settings: shared.Settings = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the resolved config and exit.")] = False,
    quiet: shared.Quiet = False,
) -> None:
    """Train a diffusion model. Run the same command again to resume.

    Examples:

      scalelong train

      scalelong train cifar10-tiny --scaling cs --kappa 0.7 --steps 5000

      scalelong train digits-uvit --objective flow

      scalelong train --data photos/ --holdout 0.05

      scalelong train --config my.yaml --set train.lr=5e-4

      accelerate launch -m scalelong train cifar10-uvit-s --scaling ls
    """
    from scalelong.errors import InvalidValueError
    from scalelong.runs.run import Run
    from scalelong.training.presets import choose, default_out

    if kappa is not None and (scaling or "cs").partition(":")[0] not in ("cs", "cs-reverse", "uniform"):
        raise InvalidValueError(f"--kappa {kappa:g} needs --scaling cs, cs-reverse or uniform, got {scaling!r}")
    begun = shared.start(
        preset, config, settings, steps=steps, data=data, image_size=image_size, channels=channels,
        background=background, holdout=holdout, skip_bad=skip_bad, quiet=quiet,
    )  # fmt: skip
    options: dict[str, Any] = {
        "scaling": scaling, "kappa": kappa, "steps": steps, "batch_size": batch_size, "seed": seed,
        "objective": objective, "settings": settings or [],
    }  # fmt: skip
    chosen = choose(begun.config, **options)
    folder = out or default_out(chosen)
    if (run := Run(folder)).exists:
        chosen = choose(begun.resumed(run.config), **options)
    if dry_run:
        if chosen.scaling.unresolved:
            from scalelong.training.auto import resolve_kappa

            chosen = resolve_kappa(chosen)[0]
        typer.echo(chosen.to_json())
        typer.echo(f"run folder: {folder}", err=True)
        return

    if _is_finished(chosen, folder):
        if not quiet:
            typer.echo(f"{folder} is finished: {chosen.train.steps} of {chosen.train.steps} steps", err=True)
        return

    shared.import_networks(chosen)
    from scalelong.training.loop import train as run_training

    result = run_training(chosen, folder, quiet=quiet)
    if not result.finished:
        raise typer.Exit(128 + (result.signal or 0))
    if not quiet:
        typer.echo(f"finished: {folder} (model/ holds the EMA network, metrics.jsonl the curves)", err=True)


def _is_finished(config: Config, folder: Path) -> bool:
    """Whether the run has nothing left to do. Checked first, because what training imports takes seconds."""
    from scalelong.data.catalog import CATALOG
    from scalelong.errors import RunError
    from scalelong.runs.config import differences
    from scalelong.runs.run import Run

    run = Run(folder)
    try:
        if not run.exists or differences(run.config, config) or run.step != config.train.steps:
            return False
    except RunError:
        return False  # training says what is wrong with the folder
    if config.data.name in CATALOG:
        return True
    from scalelong.training.examples import Examples  # the files behind a path may have changed

    stored = run.record.get("data", {}).get("fingerprint")
    return bool(stored == Examples(config, config.data.split).images.fingerprint)


def sample(
    run: shared.RunFolder,
    n: Annotated[int, Option("--n", "-n", help="Number of images.")] = 64,
    out: Annotated[
        str | None,
        Option(metavar="PATH", help="A .png file for one grid, or a folder of images. Default: RUN/samples/….png."),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the samples in the folder --out.")] = False,
    sampler: shared.Sampler = None,
    steps: shared.SamplerSteps = None,
    guidance: shared.Guidance = None,
    clip: shared.Clip = None,
    classes: Annotated[
        list[str] | None,
        Option("--class", metavar="CLASS", help="A class by number or name; repeatable. Default: all in turn."),
    ] = None,
    prompts: Annotated[list[str] | None, Option("--prompt", metavar="TEXT", help="A text prompt; repeatable.")] = None,
    seed: Annotated[int, Option(help="Image k depends on (seed, k) only, not on the batch.")] = 0,
    first: Annotated[int, Option(help="Index of the first image.")] = 0,
    batch_size: shared.BatchSize = 64,
    precision: shared.Precision = "auto",
    device: shared.Device = None,
    json: shared.Json = False,
) -> None:
    """Sample images from a trained run.

    A folder that already has samples of other settings is refused, so that sets do not mix.

    Examples:

      scalelong sample runs/digits-cs-0.7-seed0 --n 100 --out grid.png

      scalelong sample runs/emoji --prompt "a red heart" --guidance 3 --n 4

      scalelong sample runs/digits-class --class 3 --n 16 --out threes/
    """
    from scalelong.cli._samples import Target
    from scalelong.files import check_target
    from scalelong.runs.run import Run

    shared.check_sampling(sampler, precision)
    shared.check_counts(n=n, batch_size=batch_size, steps=steps)
    target = None if out is None else Target.parse(out)
    config = Run(run).config
    shared.import_networks(config)

    import time

    import numpy as np

    from scalelong.data.images import save_grid
    from scalelong.diffusion import RangeCheck
    from scalelong.diffusion.samplers import get_sampler
    from scalelong.progress import Tracker
    from scalelong.runs.generate import best_device, captions_of, grid_columns
    from scalelong.runs.run import load_run

    request = shared.sampling_request(
        config, sampler=sampler, steps=steps, guidance=guidance, precision=precision, n=n, seed=seed,
        first=first, batch_size=batch_size, clip_denoised=clip, classes=classes or None, prompts=prompts or None,
    )  # fmt: skip
    evaluations = get_sampler(request.sampler).evaluations(request.steps)
    trained = load_run(run)
    settings = {
        "run": trained.name, "step": trained.step, "sampler": request.sampler, "steps": evaluations,
        "guidance": request.guidance, "seed": seed, "precision": precision, "classes": classes or None,
        "prompts": prompts or None, "clip_denoised": request.clips(config),
    }  # fmt: skip
    if target is None:
        name = f"sample-step{trained.step}-{request.sampler}-{evaluations}-seed{seed}.png"
        target = Target(trained.samples_path / name, folder=False)
        check_target(target.path)
    old = target.check_empty(first, n, settings, overwrite) if target.folder else []
    net = trained.net.to(best_device(device))
    check = RangeCheck()
    batches = trained.generate(request, net, check)
    started = time.monotonic()
    with Tracker("sampling", -(-n // batch_size) * evaluations) as tracker:
        hook = net.register_forward_hook(lambda *_: tracker.advance())
        images = np.concatenate(list(batches))
        hook.remove()
    seconds = time.monotonic() - started
    if check.far:
        remedy = "" if request.clips(config) else "; --clip clamps the prediction at every step"
        typer.echo(f"note: {check}{remedy}", err=True)
    if target.folder:
        for path in old:
            path.unlink()
        target.write(images, first, settings)
    else:
        captions = captions_of(trained.config, trained.facts, request)
        save_grid(images, target.path, grid_columns(trained.facts, request), captions)
    if json:
        measured = {"seconds": round(seconds, 3), "far_share": check.share if check.n else None}
        shared.echo_json({"path": str(target.path), "n": n, "first": first, **settings, **measured})
    else:
        speed = f"{seconds:.1f} s, {n / seconds:.3g} images/s"
        count, length = f"{n} image{'s' * (n > 1)}", f"{evaluations} step{'s' * (evaluations > 1)}"
        typer.echo(f"{target.path}: {count}, {request.sampler}, {length}, {speed}")


def compare(
    preset: shared.PresetName = None,
    config: shared.ConfigFile = None,
    scalings: Annotated[
        str,
        Option(
            help="The baseline first: none, uniform, cs, cs-reverse, ls, norm, mp, gate, lerp, sparse, stable, rezero; "
            "cs:0.5 sets κ, auto chooses it, explicit:1,0.7,0.5 sets κ_1…κ_N.",
            autocompletion=names.complete_scaling,
        ),
    ] = "none,uniform,cs,ls",
    seeds: Annotated[str, Option(help="Number of seeds, or a list of seeds such as 4,7.")] = "3",
    steps: Annotated[int | None, Option(help="Steps of every run.")] = None,
    kappa: Annotated[float | None, Option(help="κ of cs and cs-reverse.")] = None,
    objective: shared.Objective = None,
    data: shared.DataName = None,
    image_size: shared.ImageSize = None,
    channels: shared.Channels = None,
    background: shared.Background = None,
    holdout: shared.Holdout = None,
    skip_bad: shared.SkipBad = False,
    settings: shared.Settings = None,
    distance: Annotated[
        str, Option(help="Features of the Fréchet distance: pixels (8×8 means, not FID), inception (FID), none.")
    ] = "pixels",
    samples: Annotated[int, Option(help="Number of samples for the distance.")] = 256,
    out: Annotated[Path | None, Option(help="Output folder. Default: runs/compare-PRESET.")] = None,
    jobs: shared.Jobs = None,
    gpus: shared.Gpus = 1,
    report: Annotated[bool, Option("--report/--no-report", help="Write OUT/report.html at the end.")] = True,
    open_page: shared.Open = False,
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Train variants with the same data order, noise and initial weights, and compare them over seeds.

    Run the same command again to resume; on Ctrl-C every run writes a checkpoint.

    Examples:

      scalelong compare

      scalelong compare cifar10-tiny --scalings none,cs:0.5,cs:0.7,ls --seeds 3 --steps 5000

      scalelong compare digits-uvit --seeds 1 --set model.depth=24 --out runs/deep

      scalelong compare --data photos/ --scalings none,cs --seeds 1
    """
    from scalelong.experiments.plan import DistanceSpec, parse_seeds, scaling_variants
    from scalelong.runs.run import Run
    from scalelong.training.presets import choose, start_name

    names.check_name("distance", distance, (*names.EXTRACTORS, "none"))
    chosen_seeds = parse_seeds(seeds)
    begun = shared.start(
        preset, config, settings, steps=steps, data=data, image_size=image_size, channels=channels,
        background=background, holdout=holdout, skip_bad=skip_bad, quiet=quiet,
    )  # fmt: skip
    folder = out or Path("runs") / f"compare-{start_name(choose(begun.config, objective=objective))}"
    earlier = next((run for path in sorted(folder.glob("*-seed*")) if (run := Run(path)).exists), None)
    start = begun.config if earlier is None else begun.resumed(earlier.config)
    variants = scaling_variants(start, scalings, kappa=kappa, steps=steps, objective=objective, settings=settings or [])

    from scalelong.experiments.compare import print_comparison, run_comparison
    from scalelong.report import write_report

    spec = None if distance == "none" else DistanceSpec(distance, samples)
    result = run_comparison(variants, chosen_seeds, folder, distance=spec, jobs=jobs, gpus=gpus, quiet=quiet)
    if result.signal is not None:
        typer.echo(f"stopped; run the same command again to resume (finished runs are in {folder})", err=True)
        raise typer.Exit(128 + result.signal)
    if json:
        shared.echo_json(result.comparison.to_dict())
    else:
        print_comparison(result.comparison, shared.console())
    if report and result.started:
        page = write_report([folder], folder / "report.html")
        typer.echo(f"page: {page}", err=json)
        if open_page:
            shared.open_page(page)
    if not result.comparison.complete:
        shared.print_failures(result.failures)
        raise typer.Exit(1)


def report(
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN", help="Run folders, or the folder of a comparison.", autocompletion=names.complete_run),
    ],
    out: Annotated[
        Path | None, Option(help="Default: report.html in RUN, or in the current folder for several runs.")
    ] = None,
    open_page: shared.Open = False,
) -> None:
    """Write one self-contained HTML page: curves, norms, oscillations, κ, samples, evaluation cards, configs.

    Examples:

      scalelong report runs/digits-cs-0.7-seed0

      scalelong report runs/none runs/cs runs/ls --out report.html
    """
    from scalelong.report import write_report

    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    typer.echo(f"page: {write_report(runs, page)}")
    if open_page:
        shared.open_page(page)
