"""Checkpoints: one folder per step, complete or absent, with hashes. Only safetensors and JSON."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalelong.errors import NonFiniteError, RunError, one_line
from scalelong.files import atomic_folder, sha256
from scalelong.runs.run import Run
from scalelong.training.ahead import worker_thread
from scalelong.training.sharding import own_share, whole_like

MANIFEST = "manifest.json"
TENSORS = ("model", "ema", "optimizer")
FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """How far a run is. `updates` does not count skipped steps; it drives the schedule and the EMA."""

    step: int = 0
    updates: int = 0
    images: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to resume exactly."""

    progress: Progress
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scaler: dict[str, Any]  # of fp16's gradient scaling, otherwise empty
    groups: list[dict[str, Any]] = field(default_factory=list)  # numbers that a custom optimizer keeps in its groups


def save(checkpoints: Path, state: Checkpoint, keep: int) -> Path:
    """Write a checkpoint to a temporary folder, rename it, and remove all but the last `keep`."""
    target = checkpoints / f"step-{state.progress.step:08d}"
    if target.exists():  # after a resume: an intact checkpoint of this step is what we would write
        try:
            _read(target)
            return target
        except RunError:
            shutil.rmtree(target)
    with atomic_folder(target) as folder:
        files = {}
        for name in TENSORS:
            save_file(getattr(state, name), folder / f"{name}.safetensors")
            files[f"{name}.safetensors"] = sha256(folder / f"{name}.safetensors")
        record = {"format": FORMAT, "progress": vars(state.progress), "scaler": state.scaler, "files": files}
        record |= {"groups": state.groups} if state.groups else {}
        record["digest"] = _digest(record)  # detects damage of the manifest itself
        (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    # Checkpoints of later steps were skipped as damaged: they must not displace intact ones.
    for old in [path for path in _listed(checkpoints) if _step(path) <= state.progress.step][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


class Background:
    """Writes checkpoints and model/ in a thread while training continues, one at a time, as a context manager.

    `save` copies the state and returns. A process that is killed while the thread writes leaves the checkpoint before
    intact. What goes wrong in the thread is raised by the next `save` or `wait`.
    """

    def __init__(self, run: Run, keep: int, ema: nn.Module) -> None:
        self.run, self.keep = run, keep
        self._net = copy.deepcopy(ema).to("cpu")  # the network of model/: the thread must not read the one in training
        self._pool = worker_thread("checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with suppress(Exception) if kind is not None else nullcontext():
            self.wait()
        self._pool.shutdown()

    def wait(self) -> None:
        """Return when everything is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save(self, state: Checkpoint) -> None:
        self.wait()
        copies: dict[str, Any] = {name: _on_host(getattr(state, name)) for name in TENSORS}
        copied = torch.cuda.Event() if any(t.is_cuda for t in state.model.values()) else None
        if copied is not None:
            copied.record()
        self._pending = self._pool.submit(self._write, replace(state, **copies), copied)

    def _write(self, state: Checkpoint, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        bad = [name for name, tensor in state.model.items() if not bool(tensor.isfinite().all())]
        if bad:  # it must not replace a good one
            raise NonFiniteError(
                f"{bad[0]} is not finite after step {state.progress.step} ({len(bad)} tensor(s) in total); no "
                "checkpoint was written, the previous one is intact. Try a lower learning rate or clipping"
            )
        self.run.check_exists()
        try:
            save(self.run.checkpoints_path, state, self.keep)
            self._net.load_state_dict(state.ema)
            self.run.save_model(self._net, state.progress.step)
        except (OSError, SafetensorError):
            self.run.check_exists()  # somebody removed the folder under us
            raise


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors. Copies from CUDA join its queue, before the next step changes the weights: nobody waits."""
    copies = {}
    for name, tensor in tensors.items():
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # `save` has an event for CUDA alone
    return copies


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, and a message for each damaged one that was skipped.

    Raises `RunError` if there are checkpoints and none is intact: starting over at step 1 would overwrite a run whose
    files may only be temporarily unreachable.
    """
    skipped: list[str] = []
    for folder in _listed(checkpoints):
        try:
            return _read(folder), skipped
        except RunError as damage:
            skipped.append(f"skipped the damaged checkpoint {folder.name}: {damage}")
    if skipped:
        raise RunError(
            f"no intact checkpoint in {checkpoints} ({'; '.join(skipped)}); restore one, or remove the folder to start "
            "over at step 1"
        )
    return None, skipped


def last_step(checkpoints: Path) -> int | None:
    """Return the step of the newest checkpoint by its name, without reading it."""
    return next((_step(folder) for folder in _listed(checkpoints)), None)


def _listed(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    folders = [p for p in checkpoints.glob("step-*") if p.is_dir() and p.name[5:].isdecimal()]
    return sorted(folders, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def _digest(record: dict[str, Any]) -> str:
    """Hash of a manifest without its digest."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8")).hexdigest()


def _read(folder: Path) -> Checkpoint:
    """Load a checkpoint, or raise `RunError` with the damage. Nothing is loaded before its hash is checked."""
    try:
        record = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise RunError(f"format {record['format']}, this version reads {FORMAT}")
        progress = Progress(**record["progress"])
        names = {f"{name}.safetensors" for name in TENSORS}
        if record["digest"] != _digest(record) or progress.step != _step(folder) or set(record["files"]) != names:
            raise RunError(f"{MANIFEST} was changed")
        for name, digest in record["files"].items():
            if sha256(folder / name) != digest:
                raise RunError(f"{name} does not match its hash")
        tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSORS}
        return Checkpoint(progress=progress, scaler=record["scaler"], groups=record.get("groups", []), **tensors)
    except RunError:
        raise
    except OSError as error:
        raise RunError(f"could not read {Path(error.filename or folder).name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{MANIFEST} is not valid: {one_line(error)[:100]}") from error


Pairs = Sequence[tuple[nn.Parameter, nn.Parameter]]  # of a sharded network: a parameter and its local shard


def optimizer_tensors(optimizer: torch.optim.Optimizer, net: nn.Module, shards: Pairs = ()) -> dict[str, Tensor]:
    """Return the optimizer state by parameter name (`exp_avg/NAME`…), never by order, whole also of local shards."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    of_shard: dict[Tensor, Tensor] = {shard: parameter for parameter, shard in shards}
    tensors = {}
    for owner, values in optimizer.state.items():
        parameter = of_shard.get(owner, owner)
        for key, value in values.items():
            if value is not None:
                tensors[f"{key}/{names[parameter]}"] = whole_like(torch.as_tensor(value), parameter)
    return tensors


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the numbers in the parameter groups, which some optimizers change. The schedule restores `lr` itself."""
    return [
        {k: v for k, v in group.items() if isinstance(v, (bool, int, float)) and k not in ("lr", "initial_lr")}
        for group in optimizer.param_groups
    ]


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    net: nn.Module,
    tensors: dict[str, Tensor],
    groups: list[dict[str, Any]],
    shards: Pairs = (),
) -> None:
    """Restore what `optimizer_tensors` and `optimizer_groups` returned."""
    for group, values in zip(optimizer.param_groups, groups, strict=bool(groups)):
        group.update(values)
    parameters = dict(net.named_parameters())
    shard_of: dict[Tensor, Tensor] = dict(shards)
    group_of = {owner: group for group in optimizer.param_groups for owner in group["params"]}
    for entry, value in tensors.items():
        key, _, name = entry.partition("/")
        if name not in parameters:
            raise RunError(f"the checkpoint has optimizer state for {name!r}, a parameter this network does not have")
        parameter = parameters[name]
        owner = shard_of.get(parameter, parameter)
        share = own_share(value, parameter)
        optimizer.state[owner][key] = _placed(key, share, owner, group_of.get(owner, {}))


def _placed(key: str, value: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Copy optimizer state to where torch's `load_state_dict` puts it, in the memory layout that the kernels expect."""
    if key == "step":
        kernel_reads_it = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32, copy=True) if kernel_reads_it else value.clone()
    if value.shape == parameter.shape:  # with the parameter's strides: fused kernels walk through both in parallel
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)
