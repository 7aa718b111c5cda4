"""Third-party networks that import torchvision, which has no CPU build to go with torch's.

They live in a folder of their own (`requirements-peers.txt`) that is on the path only while they are imported, after
diffusers and transformers: a torchvision that is merely present changes what transformers imports.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDERS = [Path(sys.prefix) / "peers", Path(__file__).resolve().parents[1] / ".venv" / "peers"]
NETWORKS = "networks"  # beside them: requirements-networks.txt, for the slow tests


@functools.cache
def _declare_torchvision_operators() -> torch.library.Library:
    """torchvision registers fakes of these two when it is imported; its binary, which declares them, does not load."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


@functools.cache
def lucidrains() -> ModuleType:
    """`denoising_diffusion_pytorch`, or a skipped test where it is not installed."""
    folder = next((f for f in FOLDERS if (f / "denoising_diffusion_pytorch").is_dir()), None)
    if folder is None:
        pytest.skip("denoising-diffusion-pytorch is not installed (requirements-peers.txt)")
    import diffusers.pipelines.ddpm  # noqa: F401  (and with it transformers, before torchvision can be seen)

    _declare_torchvision_operators()
    sys.path.append(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of at import is not what is tested here
            return importlib.import_module("denoising_diffusion_pytorch")
    finally:
        sys.path.remove(str(folder))


@functools.cache
def pytorch_fid() -> ModuleType:
    """`pytorch_fid.inception`, or a skipped test where it is not installed."""
    lucidrains()  # declares torchvision's operators and imports it with transformers
    folder = next(f for f in FOLDERS if (f / "denoising_diffusion_pytorch").is_dir())
    sys.path.append(str(folder))
    try:
        return importlib.import_module("pytorch_fid.inception")
    finally:
        sys.path.remove(str(folder))


@functools.cache
def network_packages() -> None:
    """Make the packages of requirements-networks.txt importable, if they are installed."""
    folders = [folder for folder in FOLDERS if (folder.parent / NETWORKS).is_dir() and folder.is_dir()]
    if not folders:
        return
    lucidrains()
    import transformers

    sys.path += [str(folders[0]), str(folders[0].parent / NETWORKS)]
    known = transformers.T5Config.from_pretrained
    try:  # imagen asks the hub for the width of a text encoder when it is imported
        transformers.T5Config.from_pretrained = classmethod(lambda cls, name, **_: cls(d_model=8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("imagen_pytorch")
    finally:
        transformers.T5Config.from_pretrained = known
