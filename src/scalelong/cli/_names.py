"""Names that commands check and complete before they import torch.

The registries of these names are modules that import torch, which takes longer than `--help` and completion may: the
names stand here a second time, and a test compares them. All others come from their registries.
"""

import os
from collections.abc import Callable
from pathlib import Path

from scalelong._objectives import OBJECTIVES, PROCESSES  # noqa: F401
from scalelong.errors import unknown

SAMPLERS = (
    "euler-maruyama", "euler-ode", "dpm-solver-fast", "ddpm", "ddpm-large", "ddim", "dpm-solver++", "dpm-solver++3s",
)  # fmt: skip
EXTRACTORS = ("inception", "inception-pytorch-fid", "dinov2", "clip", "pixels")
METRICS = (
    "fid", "frechet", "kid", "is", "precision", "recall", "density", "coverage", "mind", "fd-dinov2", "cmmd",
    "clip-score",
)  # fmt: skip
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SCHEDULERS = (
    "DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler",
    "HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LMSDiscreteScheduler",
    "PNDMScheduler", "UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler",
    "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler",
)  # fmt: skip


def check_name(kind: str, name: str | None, known: tuple[str, ...]) -> None:
    """Raise `UnknownNameError` unless `name` is known or was not given."""
    if name is not None and name not in known:
        raise unknown(kind, name, known)


def one_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Complete one of `names`."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    from scalelong.training.presets import PRESETS

    return one_of(tuple(PRESETS))(incomplete)


def complete_scaling(incomplete: str) -> list[str]:
    """Complete the last entry of a list of scalings such as `none,cs:0.5,l`."""
    from scalelong.scaling import scaling_names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in one_of(tuple(scaling_names()))(last)]


def complete_setting(incomplete: str) -> list[str]:
    from scalelong.runs.config import known_keys

    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)]


def complete_data(incomplete: str) -> list[str]:
    """Complete a dataset's name or a path."""
    from scalelong.data.catalog import CATALOG

    archives = (".npy", ".npz", ".zip", ".tar", ".tgz", ".gz")
    paths = _paths(incomplete, lambda path: path.is_dir() or path.suffix.lower() in archives)
    return [*one_of(tuple(CATALOG))(incomplete), *paths]


def complete_run(incomplete: str) -> list[str]:
    """Complete run folders, comparisons, the folders on the way to them, and the networks of the package."""
    from scalelong.runs.locate import shipped_networks

    return [*one_of(shipped_networks())(incomplete), *_paths(incomplete, os.path.isdir)]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    head, tail = os.path.split(incomplete)
    folder = Path(head or ".").expanduser()
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [path for path in entries if path.name.startswith(tail) and (tail or path.name[0] != ".") and wanted(path)]
    return [os.path.join(head, path.name) + ("/" if path.is_dir() else "") for path in names]
