"""Packages that import their public names on first use (PEP 562).

The names and their modules are listed once, as imports in the package's `__init__.pyi`, which type checkers read too.
Submodules are attributes as well: `import scalelong; scalelong.training.train`.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package: `attach(__name__, __file__)`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def submodules() -> set[str]:
        import pkgutil

        return {module.name for module in pkgutil.iter_modules([str(Path(file).parent)]) if module.name[0] != "_"}

    def get(name: str) -> Any:
        if module_of.get(name, package) == package:
            if name.startswith("_") or name not in submodules():
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *submodules()} - {"attach"})

    return get, listed, sorted(module_of)
