"""Pretrained weights of feature extractors: several sources, checked hashes, safetensors in the cache.

A file is opened only if the SHA-256 of its bytes is known here. The cache stores its tensors as safetensors, with a
hash of the tensors: the identity on evaluation cards, which is the same whichever file the tensors came from.
"""

import os
import shutil
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalelong.data.catalog import source_variable
from scalelong.data.hub import hub_is_offline
from scalelong.data.registries import Package
from scalelong.errors import EvaluationError, ScaleLongError, SourceUnavailableError
from scalelong.files import atomic_file, cache_dir, sha256, tensors_sha256


@dataclass(frozen=True)
class Weights:
    """Pretrained weights and their sources."""

    name: str  # in the cache and in messages
    variable: str  # environment variable that may name a local file
    files: Mapping[str, Callable[[Path], dict[str, Tensor]]]  # SHA-256 of a known file → its reader
    package: Package  # of the Python package index
    member: str  # path of a known file in the package
    torch_hub: tuple[str, ...]  # file names that other tools leave in torch.hub's folder
    url: str


def load_weights(weights: Weights, path: Path | str | None = None) -> dict[str, Tensor]:
    """Load float32 tensors by name from `path`, or from the first available source.

    The order: the file named by the environment variable `weights.variable`, the cache, torch.hub's folder, the
    package if it is installed, the download at `weights.url` (unless HF_HUB_OFFLINE is set), and as a last resort
    the package with pip, which says so and installs nothing. SCALELONG_SOURCE limits downloads to one of the last two.
    """
    chosen = path if path is not None else os.environ.get(weights.variable)
    if chosen:
        return _read(weights, Path(chosen).expanduser())
    cache = cache_dir() / "weights" / f"{weights.name}.safetensors"
    if (cached := _read_cache(cache)) is not None:
        return cached
    tried: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for source, fetch in _sources(weights, Path(scratch)):
            try:
                tensors = _read(weights, fetch())
            except ScaleLongError as reason:
                tried.append(f"{source}: {reason}")
            else:
                with atomic_file(cache) as temporary:
                    save_file(tensors, temporary, metadata={"digest": tensors_sha256(tensors), "source": source})
                return tensors
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


def _read(weights: Weights, path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise EvaluationError(f"the weights file {path} does not exist")
    digest = sha256(path)
    if digest not in weights.files:
        known = " or ".join(weights.files)
        raise EvaluationError(f"did not open {path}: expected {weights.name} with SHA-256 {known}, got {digest}")
    return {name: tensor.float().contiguous() for name, tensor in weights.files[digest](path).items()}


def _read_cache(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors in the cache, or None if the file is absent, damaged or foreign."""
    try:
        with safe_open(path, framework="pt") as file:
            digest = (file.metadata() or {}).get("digest")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError):
        return None
    return tensors if tensors_sha256(tensors) == digest else None


def _sources(weights: Weights, scratch: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Yield the name of each source with a function that returns the path of its file."""
    source = source_variable()
    for name in weights.torch_hub:
        yield "torch.hub's folder", partial(Path, torch.hub.get_dir(), "checkpoints", name)
    yield f"{weights.package.name}, installed", lambda: _site_packages(weights.package.name) / weights.member
    if source != "registries":
        yield weights.url, lambda: _download(weights.url, scratch / "weights")
    if source != "hub":
        yield weights.package.title, lambda: weights.package.folder() / weights.member


def _site_packages(package: str) -> Path:
    """Find the folder of an installed package through its metadata, without importing the package."""
    try:
        return Path(str(metadata.distribution(package).locate_file("")))
    except metadata.PackageNotFoundError:
        raise SourceUnavailableError("not installed") from None


def _download(url: str, target: Path) -> Path:
    if hub_is_offline():
        raise SourceUnavailableError("HF_HUB_OFFLINE is set")
    try:
        with urllib.request.urlopen(url, timeout=30) as response, open(target, "wb") as file:
            shutil.copyfileobj(response, file)
    except OSError as error:
        raise SourceUnavailableError(f"the download failed ({error})") from None
    return target
