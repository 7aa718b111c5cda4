"""`scalelong probe`: how well one linear layer reads classes from each block of a run's network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from scalelong.cli._names import check_name
from scalelong.cli._shared import (
    BatchSize,
    Device,
    Figure,
    Json,
    RunFolder,
    check_figure,
    echo_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    from scalelong.representation import LinearProbe


def probe(
    run: RunFolder,
    layers: Annotated[str, Option(help="Blocks, separated by commas; all: every block.")] = "all",
    t: Annotated[
        str | None,
        Option(
            "--t",
            help="Times of the noise, separated by commas, in the process's own unit (vp: 0 to 1; ddpm and sd: 1 to "
            "1000, or a share such as 0.05). Default: 1, 5, 10, 20 and 40 % of its range.",
        ),
    ] = None,
    n: Annotated[int | None, Option("--n", "-n", help="Images of the training split. Default: all.")] = None,
    n_test: Annotated[int | None, Option(help="Images of the test split. Default: all.")] = None,
    step: Annotated[str | None, Option(help="The checkpoint: a step, or best. Default: the last.")] = None,
    baselines: Annotated[
        bool, Option("--baselines/--no-baselines", help="Also probe raw pixels and the untrained network.")
    ] = True,
    fit: Annotated[
        str, Option(help="lbfgs: logistic regression, converged; adam: 15 epochs of Adam, as in DDAE.")
    ] = "lbfgs",
    seed: Annotated[int, Option(help="Seed of the noise.")] = 0,
    batch_size: BatchSize = 256,
    cache: Annotated[bool, Option("--cache/--no-cache", help="Keep features in the cache folder.")] = True,
    device: Device = None,
    out: Figure = None,
    json: Json = False,
) -> None:
    """Probe the frozen EMA network: a linear classifier on each block's features of noised images.

    Needs data with classes. Writes RUN/probe.json and the heat map RUN/probe.png (or --out).

    Examples:

      scalelong probe runs/digits-cs-0.7-seed0

      scalelong probe runs/digits-uvit-ls-seed0 --layers mid_block,out_blocks.0 --t 0.05,0.1 --json
    """
    from scalelong.errors import invalid
    from scalelong.files import check_target
    from scalelong.representation.linear import FITS
    from scalelong.scaling.base import numbers

    check_name("fit", fit, FITS)
    times = None if t is None else numbers(t)
    if t is not None and not times:
        raise invalid("t", "numbers separated by commas", t)
    check_figure(out)

    from scalelong.report.figures import draw_probe, save_figure
    from scalelong.runs.generate import best_device
    from scalelong.runs.run import Run
    from scalelong.training.probing import FILE, probe_run

    trained = Run(run)
    check_target(trained.folder / FILE)
    result = probe_run(
        trained, layers=layers, t=times, n=n, n_test=n_test, baselines=baselines, fit=fit, seed=seed, cache=cache,
        step=int(step) if step is not None and step.isdecimal() else step, batch_size=batch_size,
        device=best_device(device),
    )  # fmt: skip
    result.save(trained.folder / FILE)
    figure = out or trained.folder / "probe.png"
    save_figure(draw_probe(result, trained.name), figure)
    if json:
        echo_json({"run": trained.name, **result.to_dict()})
    else:
        _print(result, trained.name)
        typer.echo(f"wrote {trained.folder / FILE} and {figure}")


def _print(result: LinearProbe, name: str) -> None:
    best = result.best
    rows = []
    for block, values in zip(result.blocks, result.accuracy, strict=True):
        marks = ["*" if (block, t) == (best.block, best.t) else "" for t in result.times]
        rows.append([block, *(f"{mark}{value:.4f}" for mark, value in zip(marks, values, strict=True))])
    title = f"{name}: probe accuracy by block and time, {result.n_train} training and {result.n_test} test images"
    print_table(title, ["block", *(f"t = {t:g}" for t in result.times)], rows)
    print_lines(result.summary())
    if result.conditioning_block is not None:
        print_lines(
            [f"self-conditioning on it: scalelong train … --set self_conditioning.block={result.conditioning_block}"]
        )
