"""Packages that import their public names on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(
    package: str, homes: dict[str, tuple[str, ...]], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` for a package. `homes` maps modules to their public names.

    `rooms` are subpackages available as attributes without importing them first.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, sorted(home_of)
