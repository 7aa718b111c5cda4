"""torch-fidelity without its package's __init__, which imports torchvision."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from types import ModuleType


@functools.cache
def fidelity(module: str) -> ModuleType:
    """Import a module of torch-fidelity, which the development environment installs without its requirements."""
    if "torch_fidelity" not in sys.modules:
        spec = importlib.util.find_spec("torch_fidelity")
        if spec is None or spec.origin is None:
            raise ImportError("torch-fidelity is not installed: pip install --no-deps torch-fidelity")
        package = types.ModuleType("torch_fidelity")
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules["torch_fidelity"] = package
    return importlib.import_module(f"torch_fidelity.{module}")


def fidelity_metric(name: str) -> ModuleType:
    """Import torch_fidelity.metric_NAME, whose functions of features need nothing of its image pipeline."""
    fidelity("helpers")
    if "torch_fidelity.utils" not in sys.modules:
        pipeline = types.ModuleType("torch_fidelity.utils")  # the real one imports torchvision
        pipeline.__getattr__ = lambda attribute: None  # type: ignore[method-assign]
        sys.modules["torch_fidelity.utils"] = pipeline
    return fidelity(f"metric_{name}")


def torchmetrics_image(module: str) -> ModuleType:
    """Import torchmetrics.image.fid or .kid, which import torch-fidelity where it is installed."""
    fidelity("feature_extractor_inceptionv3")
    return importlib.import_module(f"torchmetrics.image.{module}")
