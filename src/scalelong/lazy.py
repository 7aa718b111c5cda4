"""Packages whose names are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(
    package: str, homes: dict[str, tuple[str, ...]], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package: `homes` says in which module each public name is.

    `rooms` are subpackages that are reached as attributes without an import of their own.
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
