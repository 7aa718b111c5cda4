"""Check the docstrings of public names, from the source: `make docs`.

A public name is what a reference page shows by `::: scalelong.NAME`, which must include every name of `scalelong`. It
has a docstring; those of `scalelong` itself and of `COMPLETE` name every argument and what is returned, and have an
example, as do the public methods of their classes (an example in the class counts). tests/test_docstrings.py runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
COMPLETE = (
    "mup.roles", "mup.init_", "mup.param_groups", "scaling.Scaling", "scaling.FixedScaling", "training.train",
    "training.preset", "training.override",
)  # fmt: skip


def shown() -> list[str]:
    """The names on the reference pages, without the package's."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    return re.findall(r"^::: scalelong\.(\S+)", "\n".join(pages), flags=re.M)


def complete() -> list[str]:
    """The names whose docstrings must be complete."""
    stub = (ROOT / "src" / "scalelong" / "__init__.pyi").read_text(encoding="utf-8")
    return [name for name in re.findall(r" as (\w+)$", stub, flags=re.M) if name != "__version__"] + list(COMPLETE)


def problems() -> Iterator[str]:
    options: dict[str, Any] = {"search_paths": [ROOT / "src"], "docstring_parser": "google", "allow_inspection": False}
    package: Any = griffe.load("scalelong", **options, resolve_aliases=True)
    listed = shown()
    for name in sorted({*complete(), *listed}):
        value = package[name]
        value = value.final_target if value.is_alias else value
        if name not in listed and not value.is_module:
            yield f"scalelong.{name} is on no reference page: add `::: scalelong.{name}` to one"
        if value.docstring is None:
            yield f"scalelong.{name} has no docstring"
        elif name in complete() and not value.is_module:
            yield from (f"scalelong.{name}{problem}" for problem in _incomplete(value))


def _incomplete(value: Any) -> Iterator[str]:
    if value.is_function:
        yield from _function(value, [value], _text([value]))
        return
    family = [value, *value.mro()]
    fields = {entry.name.strip("*") for cls in family for entry in _entries(cls, "parameters", "attributes")}
    for parameter in value.parameters:
        if parameter.name != "self" and parameter.name.strip("*") not in fields:
            yield f": no description of {parameter.name!r}"
    if ">>>" not in value.docstring.value:
        yield ": no example"
    for name in dict.fromkeys(name for cls in family for name in cls.members):
        own = [cls.members[name] for cls in family if name in cls.members and not cls.members[name].is_alias]
        if (
            name.startswith("_")
            or name == "extra_repr"
            or not own
            or not (own[0].is_function or "property" in own[0].labels)
        ):
            continue
        documented = next((member for member in own if member.docstring is not None), None)
        if documented is None and name not in fields:
            yield f".{name} has no docstring"
        elif documented is not None and own[0].is_function:
            lines = re.findall(r"^ *(?:>>>|\.\.\.) .*", _text(family), flags=re.M)
            example = ">>>" if f".{name}" in "\n".join(lines) else _text([documented])
            yield from (f".{name}{problem}" for problem in _function(own[0], [documented], example))


def _function(function: Any, documented: list[Any], example: str) -> Iterator[str]:
    described = {entry.name.strip("*") for one in documented for entry in _entries(one, "parameters")}
    for parameter in function.parameters:
        if parameter.name not in ("self", "cls") and parameter.name not in described:
            yield f": no description of {parameter.name!r}"
    if str(function.returns) not in ("None", "") and not any(_entries(one, "returns") for one in documented):
        yield ": no `Returns:`"
    if ">>>" not in example:
        yield ": no example"


def _entries(value: Any, *kinds: str) -> list[Any]:
    sections = [] if value.docstring is None else value.docstring.parsed
    return [entry for section in sections if section.kind.value in kinds for entry in section.value]


def _text(values: list[Any]) -> str:
    return "\n".join(value.docstring.value for value in values if value.docstring is not None)
