"""Checkpoints: one folder each, whole or absent, with hashes; safetensors and JSON only."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.errors import ScaleLongError
from scalelong.files import atomic_folder, sha256

MANIFEST = "manifest.json"
TENSORS = ("model", "ema", "optimizer")
FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """How far a run is. `updates` leaves out skipped steps: it drives the schedule and the EMA."""

    step: int = 0
    updates: int = 0
    images: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped."""

    progress: Progress
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scaler: dict[str, Any]  # of fp16's gradient scaling, empty elsewhere


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def save(checkpoints: Path, state: Checkpoint, keep: int) -> Path:
    """Write a checkpoint aside and rename it into place; then let go of all but the last `keep`."""
    target = folder_of(checkpoints, state.progress.step)
    if target.exists():  # the same step again, after a resume: the folder there is what would be written
        if _damage(target) is None:
            return target
        shutil.rmtree(target)
    with atomic_folder(target) as folder:
        for name in TENSORS:
            tensors = {k: v.detach().cpu().contiguous() for k, v in getattr(state, name).items()}
            save_file(tensors, folder / f"{name}.safetensors")
        files = {f"{name}.safetensors": sha256(folder / f"{name}.safetensors") for name in TENSORS}
        record = {"format": FORMAT, "progress": vars(state.progress), "scaler": state.scaler, "files": files}
        record["digest"] = _digest(record)  # a flipped bit in the manifest itself shows as well
        (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    # Later steps are checkpoints that were passed over as damaged: they must not push out the good ones.
    for old in [path for path in _listed(checkpoints) if _step(path) <= state.progress.step][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each damaged one that was passed over.

    Where there are checkpoints and none is whole, that is an error: to start at step 1 would write over what may
    only be out of reach for a while.
    """
    notes: list[str] = []
    for folder in _listed(checkpoints):
        damage = _damage(folder)
        if damage is None:
            return _load(folder), notes
        notes.append(f"checkpoint {folder.name} is damaged ({damage}) and was passed over")
    if notes:
        raise ScaleLongError(
            f"no checkpoint in {checkpoints} can be used: {'; '.join(notes)}. "
            "Put a whole one there, or take the folder away to start at step 1"
        )
    return None, notes


def last_step(checkpoints: Path) -> int | None:
    """The step of the newest checkpoint by name, without a look inside."""
    return next((_step(folder) for folder in _listed(checkpoints)), None)


def _listed(checkpoints: Path) -> list[Path]:
    """Newest first."""
    found = [p for p in checkpoints.glob("step-*") if p.is_dir() and p.name[5:].isdecimal()]
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def _digest(record: dict[str, Any]) -> str:
    """Of everything in a manifest but the digest."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8")).hexdigest()


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            return f"format {record['format']}, this version reads {FORMAT}"
        if record["digest"] != _digest(record) or Progress(**record["progress"]).step != _step(folder):
            return f"{MANIFEST} is not what was written"
        if set(record["files"]) != {f"{name}.safetensors" for name in TENSORS}:
            return "its manifest lists other files"
        for name, digest in record["files"].items():
            if sha256(folder / name) != digest:
                return f"{name} does not have the hash in the manifest"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not what was written"
    return None


def _load(folder: Path) -> Checkpoint:
    record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    try:
        tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSORS}
    except (SafetensorError, OSError) as error:
        raise ScaleLongError(f"{folder} cannot be read: {error}") from error
    return Checkpoint(progress=Progress(**record["progress"]), scaler=record["scaler"], **tensors)


# ------------------------------------------------------------------- optimizer state by parameter name


def optimizer_tensors(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """`exp_avg/NAME` and so on: state goes by name, never by order."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    flat = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            flat[f"{key}/{names[parameter]}"] = torch.as_tensor(value)
    return flat


def restore_optimizer(optimizer: torch.optim.Optimizer, net: nn.Module, flat: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` back, each beside its parameter."""
    by_name = dict(net.named_parameters())
    for entry, value in flat.items():
        key, _, name = entry.partition("/")
        if name not in by_name:
            raise ScaleLongError(f"the checkpoint's optimizer knows {name!r}, which the network does not have")
        parameter = by_name[name]
        moved = value.clone() if key == "step" else value.to(parameter.device, copy=True)
        optimizer.state[parameter][key] = moved
