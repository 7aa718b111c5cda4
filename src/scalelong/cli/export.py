"""`scalelong export`: the network of a run as ONNX or as a torch.export program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from scalelong.cli import _shared as shared


def export(
    run: shared.RunFolder,
    onnx: Annotated[bool, Option("--onnx", help="Write ONNX, which onnxruntime and others run.")] = False,
    torch_export: Annotated[
        bool, Option("--torch-export", help="Write a program that torch.export.load opens without this package.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder of the exported files. Default: RUN/export.")] = None,
    json: shared.Json = False,
) -> None:
    """Export the trained network: `output = net(x, t)`, with y or context where the run has conditions; κ included.

    The file is read back and compared with the network at batch sizes 1, 3 and 8; outputs must agree to 1e-4.

    Examples:

      scalelong export digits --onnx

      scalelong export runs/digits-cs-0.7-seed0 --onnx --torch-export --out exported/
    """
    from scalelong.errors import InvalidValueError
    from scalelong.files import check_target
    from scalelong.runs.run import Run

    formats = [name for name, wanted in (("onnx", onnx), ("torch-export", torch_export)) if wanted]
    if not formats:
        raise InvalidValueError("expected --onnx, --torch-export or both")
    folder = out or run / "export"
    check_target(folder, folder=True)
    shared.import_networks(Run(run).config)
    from scalelong.runs.export import FILES, export_run
    from scalelong.runs.run import load_run

    trained = load_run(run)
    for name in formats:
        made = export_run(trained, name, folder / FILES[name])
        if json:
            shared.echo_json({**vars(made), "path": str(made.path)})
            continue
        size = made.path.stat().st_size / 1e6
        limit = f", batches of 1 to {made.largest_batch}" if made.largest_batch else ""
        called = f"net({', '.join(made.inputs)}){limit}"
        typer.echo(f"{made.path}: {size:.1f} MB, {called}, outputs equal to {made.difference:.1g}")
