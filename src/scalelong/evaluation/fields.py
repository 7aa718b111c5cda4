"""Whether what was read from a file has the types that a dataclass says."""

from __future__ import annotations

import types
import typing
from dataclasses import fields
from typing import Any

from scalelong.errors import ScaleLongError


def check_fields(part: Any) -> None:
    """Raise for a field whose value is not of its annotated type: somebody wrote the file by hand."""
    hints = typing.get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if not _fits(value, hints[field.name]):
            raise ScaleLongError(f"{field.name} is {str(value)[:40]!r}, which cannot be")


def said(error: Exception) -> str:
    """What a dataclass says of fields that it cannot take, for people."""
    return str(error).replace("got an unexpected keyword argument", "does not know")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint in (int, float):
        if isinstance(value, int) and abs(value) > 1e300:  # JSON may hold what no float does
            return False
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)
