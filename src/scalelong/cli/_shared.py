"""What the commands share: option declarations, tables, JSON output and checks of output paths."""

from __future__ import annotations

import json as json_module
import math
import os
import sys
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from scalelong.cli import _names as names

if TYPE_CHECKING:
    from rich.console import Console

    from scalelong.experiments.scheduler import Ending
    from scalelong.runs import Config, Request
    from scalelong.training.start import Start

# Options that several commands take. Defaults stand in the signatures.
PresetName = Annotated[
    str | None,
    Argument(
        help="Name of a preset; `scalelong presets` lists them. Default: digits, or what fits --data.",
        autocompletion=names.complete_preset,
    ),
]
ConfigFile = Annotated[
    Path | None, Option("--config", help="A YAML or JSON file of settings; `scalelong presets NAME --yaml` prints one.")
]
DataName = Annotated[
    str | None,
    Option(
        "--data",
        help="A dataset name, a folder, an archive, a .npy file or hf:NAME.",
        autocompletion=names.complete_data,
    ),
]


def _locate(run: Path) -> Path:
    from scalelong.runs.locate import locate

    return locate(run)


RunFolder = Annotated[
    Path,
    Argument(
        metavar="RUN",
        help="A run folder, digits (a trained network of the package) or hf:OWNER/NAME.",
        autocompletion=names.complete_run,
        callback=_locate,
    ),
]
Open = Annotated[bool, Option("--open", help="Open the page in a browser, where there is one.")]
DatasetName = Annotated[
    str,
    Argument(
        help="A dataset name, a folder or archive of images, a .npy or .npz file, or hf:NAME.",
        autocompletion=names.complete_data,
    ),
]
Json = Annotated[bool, Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print no progress.")]
Figure = Annotated[Path | None, Option(help="Write the figure to this file (.png, .svg or .pdf).")]
Gpus = Annotated[int, Option(min=1, help="GPUs of one run.")]
Jobs = Annotated[int | None, Option(help="Runs in parallel. Default: one per GPU, or one per CPU core.")]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting; repeatable: train.lr=1e-3, checkpoint.every=100, …",
        autocompletion=names.complete_setting,
    ),
]
# How images become data: `data prepare` and everything that trains take the same options.
ImageSize = Annotated[int | None, Option(help="Center-crop and resize to this many pixels.")]
Channels = Annotated[int | None, Option(help="1 for gray, 3 for color. Default: the dataset's own.")]
Background = Annotated[str | None, Option(help="Color under transparent images, such as white.")]
Holdout = Annotated[float | None, Option(help="Fraction of train to hold out for validation.")]
SkipBad = Annotated[bool, Option("--skip-bad", help="Skip unreadable files and list them.")]
BatchSize = Annotated[int, Option(help="Images per batch.")]
Device = Annotated[str | None, Option(help="cpu, cuda or mps. Default: the fastest available device.")]
Precision = Annotated[
    str,
    Option(
        help="Precision of sampling: fp32, bf16, fp16, or auto: that of training on a GPU, fp32 elsewhere.",
        autocompletion=names.one_of(names.PRECISIONS),
    ),
]
EXTRACTOR_HELP = (
    "inception (FID), inception-pytorch-fid (FID as the official code resizes), dinov2, clip, or pixels (8×8 means, "
    "not FID)."
)
Extractor = Annotated[str, Option(help=EXTRACTOR_HELP, autocompletion=names.one_of(names.EXTRACTORS))]
Weights = Annotated[
    Path | None,
    Option(help="A local file with the extractor's weights; for dinov2 and clip a folder, checkpoint or hub name."),
]
Sampler = Annotated[
    str | None,
    Option(
        help=f"{', '.join(names.SAMPLERS)}, or a scheduler of diffusers such as {names.SCHEDULERS[-2]}. "
        "Default: the run's.",
        autocompletion=names.one_of((*names.SAMPLERS, *names.SCHEDULERS)),
    ),
]
Objective = Annotated[
    str | None,
    Option(
        help=f"What the network predicts: {', '.join(names.OBJECTIVES)}. Default: the preset's.",
        autocompletion=names.one_of(tuple(names.OBJECTIVES)),
    ),
]
SamplerSteps = Annotated[int | None, Option(help="Network evaluations per image. Default: the run's.")]
Guidance = Annotated[
    float | None, Option(help="Classifier-free guidance; 1 turns it off, and the paper's scale s is s + 1 here.")
]
Clip = Annotated[
    bool | None,
    Option("--clip/--no-clip", help="Clamp the predicted image to the data's range at every step. Default: the run's."),
]


def comma_words(text: str) -> list[str]:
    """Return the words of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(option: str, text: str) -> list[int]:
    """Return the numbers of a comma-separated option."""
    from scalelong.errors import invalid

    words = comma_words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise invalid(option, "integers >= 1, comma-separated", text)
    return [int(word) for word in words]


class _Flags:
    """Show a flag as `--json`, not as `--json <bool>`, which newer versions of typer do."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_Flags, TyperCommand):
    """A command."""


class Group(_Flags, TyperGroup):
    """A command with commands."""


def start(
    preset: str | None, file: Path | None, settings: list[str] | None, *, steps: int | None, data: str | None,
    image_size: int | None, channels: int | None, background: str | None, holdout: float | None, skip_bad: bool,
    quiet: bool,
) -> Start:  # fmt: skip
    """Return the config that preset, --config and the options about data give, and print what the data decided."""
    from scalelong.training.start import start_from

    options = {
        "train.steps": steps, "data.name": data, "data.image_size": image_size, "data.channels": channels,
        "data.background": background, "data.holdout": holdout, "data.skip_bad": skip_bad or None,
    }  # fmt: skip
    begun = start_from(preset, file, options, settings or [])
    for note in () if quiet or os.environ.get("RANK", "0") != "0" else begun.notes:
        typer.echo(note, err=True)
    return begun


def echo_json(value: Any) -> None:
    """Print `value` as one line of JSON; numbers that are not finite become null."""
    typer.echo(json_module.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_figure(path: Path | None) -> None:
    """Raise before the work starts if no figure can be written to `path`."""
    from scalelong.files import FIGURES, check_target

    if path is not None:
        check_target(path, suffixes=FIGURES)


def check_counts(**counts: int | None) -> None:
    """Raise unless every given count is at least 1; keywords are option names without the dashes."""
    from scalelong.errors import invalid

    for name, count in counts.items():
        if count is not None and count < 1:
            raise invalid(f"--{name.replace('_', '-')}", "an integer >= 1", count)


def check_sampling(sampler: str | None, precision: str, extractor: str | None = None) -> None:
    """Check names before torch is imported, which takes a second or two."""
    if sampler is None or not sampler.endswith("Scheduler"):  # diffusers' names are checked where it is imported
        names.check_name("sampler", sampler, (*names.SAMPLERS, *names.SCHEDULERS))
    names.check_name("precision", precision, names.PRECISIONS)
    names.check_name("extractor", extractor, names.EXTRACTORS)


STANDALONE = False  # whether this process runs one command and nothing else; set by `main`


def import_networks(config: Config) -> None:
    """Save the imports that diffusers makes for packages which a run without text and latents does not use."""
    if STANDALONE and config.data.text is None and config.data.vae is None:
        from scalelong.models.imports import import_networks

        import_networks()


def open_page(page: Path) -> None:
    """Open a page in a browser, unless there is none, no display, or this is a continuous-integration job."""
    import webbrowser

    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    opened = bool(screen) and not os.environ.get("CI") and webbrowser.open(page.resolve().as_uri())
    if not opened:
        typer.echo(f"no browser here; open {page.resolve()}", err=True)


def sampling_request(
    config: Config, *, sampler: str | None, steps: int | None, guidance: float | None, precision: str, **options: Any
) -> Request:
    """Complete the options of sampling with the defaults of a run, and check them before any work starts."""
    from scalelong.diffusion import get_objective
    from scalelong.diffusion.samplers import get_sampler
    from scalelong.runs.generate import Request, autocast_type

    defaults = config.sample
    request = Request(
        sampler=sampler or defaults.sampler,
        steps=steps if steps is not None or sampler is not None else defaults.steps,
        guidance=defaults.guidance if guidance is None else guidance,
        precision=precision,
        **options,
    )
    get_sampler(request.sampler).check(get_objective(config.diffusion.spec()), request.steps)
    autocast_type(precision)
    request.clips(config)
    return request


def console() -> Console:
    """Return a console that does not wrap at 80 columns when the output goes to a file or a pipe."""
    from rich.console import Console

    screen = Console(emoji=False, highlight=False)
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = 120
    return screen


def print_lines(lines: Iterable[str], prefix: str = "") -> None:
    """Print each line as it is, wrapped at the console's width."""
    screen = console()
    for line in lines:
        screen.print(prefix + line, markup=False)


def print_failures(failures: Iterable[Ending]) -> None:
    """Print how runs failed and the end of their logs, as errors."""
    for ending in failures:
        title = f"error: {ending.job.name} {ending.reason()}; the last lines of its log:"
        typer.echo("\n    ".join([title, *ending.lines]), err=True)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, caption: str = "",
    wrap: bool = True, lines: bool = False, right: Container[int] | None = None, whole: Container[int] = (),
) -> None:  # fmt: skip
    """Print a table: columns in `right` (default: all but the first `left`) right-aligned. No columns: no header.

    Right-aligned columns, those in `whole`, or all with `wrap=False` are not wrapped. A table that does not fit the
    terminal is printed row by row, one line per column, so that no number is cut.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    rows, screen = [list(row) for row in rows], console()
    aligned = [k >= left if right is None else k in right for k in range(len(columns))]
    kept = [not wrap or aligned[k] or k in whole for k in range(len(columns))]
    if title:  # on its own line: rich wraps a table's own title at the table's width
        screen.print(title, style="bold", markup=False)
    table = Table(
        box=box.SQUARE if lines else box.SIMPLE_HEAD,
        show_lines=lines,
        show_header=bool(columns),
        padding=(0, 1) if lines else (0, 0, 0, 1),
    )
    needed = sum(_columns_needed([head, *(row[k] for row in rows)], kept[k]) for k, head in enumerate(columns))
    if needed + (3 if lines else 2) * len(columns) + 1 > screen.width:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for row in rows:
            for head, cell in zip(columns, row, strict=True):
                table.add_row(f"[dim]{escape(head)}[/]", escape(cell))
            table.add_row()
    else:
        for k, head in enumerate(columns):
            justify = "right" if aligned[k] else "left"
            table.add_column(escape(head), justify=justify, no_wrap=kept[k], overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*map(escape, row))
    screen.print(table)
    if caption:
        screen.print(caption, style="dim", markup=False)


def _columns_needed(cells: Iterable[str], whole: bool) -> int:
    """Return the width of the longest line of any cell, or of the longest word if the cells may wrap."""
    from rich.cells import cell_len

    return max((cell_len(part) for cell in cells for part in (cell.splitlines() if whole else cell.split())), default=0)
