"""`scalelong presets`: what can be trained by name."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer


def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset's whole config.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the presets with their parameters, data and cost a step.

    Examples:

      scalelong presets

      scalelong presets cifar10-uvit-s
    """
    from scalelong.training.presets import PRESETS, preset, sizes

    if name is not None:
        typer.echo(json_module.dumps(preset(name).to_dict(), indent=2))
        return
    known = sizes()
    rows = [{"name": key, **known[key], "size": p.size, "summary": p.summary} for key, p in PRESETS.items()]
    if json:
        typer.echo(json_module.dumps(rows))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title="Presets: scalelong train NAME", title_justify="left", padding=(0, 1, 0, 0), box=None)
    for column in ("preset", "parameters", "N", "batch × steps", "TFLOP a step", "what it is"):
        right = column in ("parameters", "N", "TFLOP a step")
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "preset")
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['parameters'] / 1e6:.2f}M",
            str(row["skips"]),
            f"{row['batch_size']} × {_short(row['steps'])}",
            f"{row['flop_per_step'] / 1e12:.3g}",
            str(row["summary"]),
            end_section=row["name"] == "emoji-tiny",
        )
    Console().print(table)


def _short(steps: int) -> str:
    return (
        f"{steps // 1_000_000}M" if steps % 1_000_000 == 0 else f"{steps // 1000}k" if steps % 1000 == 0 else str(steps)
    )
