"""Fixtures for the data tests: an empty cache, and small image folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import picture


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the user's cache and local copies are hidden."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SCALELONG_CACHE", str(folder))
    monkeypatch.delenv("SCALELONG_DATA", raising=False)
    monkeypatch.delenv("SCALELONG_SOURCE", raising=False)
    return folder


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    """Two classes of three PNG images each."""
    root = tmp_path / "images"
    for number, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for index in range(3):
            picture(10 * number + index).save(root / name / f"{index}.png")
    return root


@pytest.fixture
def flat_folder(tmp_path: Path) -> Path:
    """Four PNG images without classes."""
    root = tmp_path / "flat"
    root.mkdir()
    for index in range(4):
        picture(index).save(root / f"{index}.png")
    return root
