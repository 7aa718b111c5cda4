"""The run folder: its files, its lock, its logs, and the trained network that comes out of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from scalelong.errors import ScaleLongError, one_line, out_of_memory
from scalelong.files import atomic_folder, sweep, write_text
from scalelong.json_lines import blocks
from scalelong.runs.config import Config
from scalelong.training.examples import Facts

if TYPE_CHECKING:
    from scalelong.models.pipeline import ScaleLongPipeline

CONFIG = "config.json"
STEP = "step.json"  # which step the network in model/ is of


class Run:
    """Where everything of a run is."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / "metrics.jsonl"
        self.stability = self.folder / "stability.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.samples = self.folder / "samples"
        self.model = self.folder / "model"
        self.report = self.folder / "report.html"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def record(self) -> dict[str, Any] | None:
        """What config.json holds, or None where there is no run yet."""
        path = self.folder / CONFIG
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise ScaleLongError(f"{path} cannot be read: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
            raise ScaleLongError(f"{path} is not a run's config: it has no 'config'")
        if not isinstance(record.get("data", {}), dict):
            raise ScaleLongError(f"{path} is not a run's config: 'data' is {record['data']!r}")
        return record

    def config(self) -> Config:
        record = self.record()
        if record is None:
            raise ScaleLongError(f"{self.folder} is not a run folder: it has no {CONFIG}")
        return Config.from_dict(record["config"])

    def write_record(self, record: dict[str, Any]) -> None:
        write_text(self.folder / CONFIG, json.dumps(record, indent=2) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out. The lock is the system's own: it ends with its owner, however that ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a+b") as handle:
            if not _try_lock(handle.fileno()):
                handle.seek(0)
                owner = handle.read(64).decode("ascii", "replace").strip()
                raise ScaleLongError(f"{self.folder} is in use by another process{f' ({owner})' if owner else ''}")
            handle.seek(0)
            handle.truncate()
            handle.write(f"process {os.getpid()}".encode("ascii"))
            handle.flush()
            self._recover_model()
            self._sweep()
            yield

    def check_there(self) -> None:
        """A folder that somebody removed must not come back with half of its files."""
        if not (self.folder / CONFIG).is_file():
            raise ScaleLongError(f"{self.folder} was removed or emptied while it was trained; nothing more is written")

    def save_model(self, net: nn.Module, step: int) -> None:
        """Replace `model/` by this network, in diffusers' folder format with the scaling beside it."""
        from scalelong.skips import save_scaling, unscaled

        fresh, old = self._asides()
        shutil.rmtree(fresh, ignore_errors=True)
        with atomic_folder(fresh) as folder:
            own = "scaling" in net.config  # type: ignore[operator]  # a network that saves its scaling itself
            with nullcontext() if own else unscaled(net):
                net.save_pretrained(folder)  # type: ignore[operator]
            save_scaling(net, folder)
            (folder / STEP).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        if self.model.exists():
            os.rename(self.model, old)
        os.rename(fresh, self.model)
        shutil.rmtree(old, ignore_errors=True)

    def _recover_model(self) -> None:
        """A kill between the two renames of `save_model` leaves the network aside: put the newer one in place."""
        fresh, old = self._asides()
        if not self.model.exists():
            for aside in (fresh, old):
                if aside.exists():
                    os.rename(aside, self.model)
                    break
        shutil.rmtree(old, ignore_errors=True)

    def _sweep(self) -> None:
        """Let go of what a killed process was writing, so that many kills do not fill the disk."""
        sweep(self.folder, "config.json", "stability.jsonl", ".model-new")
        sweep(self.checkpoints, "step-*")
        sweep(self.samples, "step-*")

    def model_step(self) -> int | None:
        """The step that the network in `model/` is of, or None where there is none that can be read."""
        try:
            return _step_of(self.model)
        except ScaleLongError:
            return None

    def _asides(self) -> tuple[Path, Path]:
        return self.folder / ".model-new", self.folder / ".model-old"


class JsonLines:
    """A log of one JSON object a line that never holds a step twice and survives a torn last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def keep_until(self, step: int) -> int:
        """Drop a torn last line and every line of a later step; returns the last step left. Reads from the end only."""
        last = 0
        if not self.path.exists():
            return last
        with open(self.path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            for start, line in _lines_backwards(file, end):
                try:
                    entry = json.loads(line)
                    if line.endswith(b"\n") and entry.get("step", 0) <= step:
                        last = int(entry.get("step", 0))
                        break
                except (ValueError, AttributeError, TypeError, RecursionError, OverflowError):
                    pass  # torn, or not of this log
                end = start
            file.truncate(end)
        return last

    def write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  (kept open for the run)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Push what was written to the disk: a checkpoint must never be ahead of its log."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            try:
                self.sync()
            finally:
                file, self._file = self._file, None
                file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; a torn last line is left out."""
    return [entry for rows in blocks(path) for entry in rows]


@dataclass(frozen=True)
class TrainedRun:
    """A trained network with what is needed to sample from it."""

    run: Run
    config: Config
    net: nn.Module  # the EMA network
    facts: Facts
    step: int

    def pipeline(self) -> ScaleLongPipeline:
        """The network as a diffusers pipeline."""
        from scalelong.models.pipeline import ScaleLongPipeline

        return ScaleLongPipeline.of(self.net, self.config.diffusion.process, self.facts.null_y)


def load_run(folder: Path | str) -> TrainedRun:
    """Open a run's trained (EMA) network: `load_run("runs/digits").net`."""
    run = Run(folder)
    record = run.record()
    if record is None:
        raise ScaleLongError(f"{run.folder} is not a run folder: it has no {CONFIG}; scalelong train makes one")
    if not run.model.is_dir():
        raise ScaleLongError(f"{run.folder} has no trained network yet (model/); let it reach a checkpoint first")
    return TrainedRun(
        run=run,
        config=Config.from_dict(record["config"]),
        net=load_network(run.model).eval(),
        facts=Facts.from_dict(record),
        step=_step_of(run.model),
    )


def load_network(folder: Path) -> nn.Module:
    """A network saved in diffusers' folder format, its scaling put back."""
    import diffusers

    from scalelong.models import UViT
    from scalelong.skips import load_scaling

    try:
        name = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ScaleLongError(f"{folder} is not a saved network: {error}") from error
    if name not in ("UViT", "UNet2DModel", "UNet2DConditionModel"):
        raise ScaleLongError(f"{folder} holds a {name!r}, which is not a network of this package")
    try:
        if name == "UViT":
            return UViT.from_pretrained(folder, use_safetensors=True)
        net = getattr(diffusers, name).from_pretrained(folder, use_safetensors=True)
    except ScaleLongError:
        raise
    except Exception as error:  # diffusers raises all kinds for a config or weights that were tampered with
        if out_of_memory(error):
            raise
        raise ScaleLongError(f"the network in {folder} cannot be read: {one_line(error)[:300]}") from error
    return load_scaling(net, folder)


def _step_of(model: Path) -> int:
    try:
        return int(json.loads((model / STEP).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ScaleLongError(f"{model / STEP} cannot be read: {error}") from error


def _lines_backwards(file: Any, end: int, block: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    """(start, line) from the last line to the first, without reading the whole file."""
    tail, position = b"", end
    while position > 0:
        size = min(block, position)
        position -= size
        file.seek(position)
        tail = file.read(size) + tail
        while True:
            cut = tail.rfind(b"\n", 0, len(tail) - 1)
            if cut < 0:
                break
            yield position + cut + 1, tail[cut + 1 :]
            tail = tail[: cut + 1]
    if tail:
        yield 0, tail


def _try_lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
