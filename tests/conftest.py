"""Shared by every test: one thread, no network, a cache of its own."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# `make test` says the same of the same code every time; `make test-slow` and `make test-faults` go on searching.
settings.register_profile("steady", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def screen():
    """docs/screenshot.py, which opens Chromium and takes the pictures of the documentation."""
    path = Path(__file__).parents[1] / "docs" / "screenshot.py"
    spec = importlib.util.spec_from_file_location("screenshot", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def driver(screen, tmp_path_factory):
    """Headless Chromium, for the tests of a module."""
    driver = screen.open_chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
