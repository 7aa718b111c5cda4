"""Errors made for people: one sentence that names the thing, the value and what would be right."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class ScaleLongError(ValueError):
    """What the user gave cannot be used as it is. Commands print the message alone and exit with 1."""


class ScalingWarning(UserWarning):
    """A scaling that is allowed but that the paper's analysis advises against."""


class EvaluationWarning(UserWarning):
    """A figure that can be computed but says little, such as a covariance of fewer images than features."""


class MissingExtraError(ImportError):
    """An optional part of the installation is needed and absent."""


def require(module: str, extra: str, purpose: str = "") -> ModuleType:
    """Import `module`, or say which extra of the package brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or not module.startswith(error.name.split(".")[0]):
            raise
        why = f" for {purpose}" if purpose else ""
        raise MissingExtraError(
            f"{module.split('.')[0]} is needed{why} and is not installed: pip install 'scalelong[{extra}]'",
            name=error.name,
        ) from error


def suggestion(name: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: str, options: Iterable[str]) -> ScaleLongError:
    """The error for a name that is not among `options`."""
    options = list(options)
    listed = ", ".join(options)
    return ScaleLongError(f"unknown {kind} {name!r}{suggestion(name, options)} (known: {listed})")


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: Python's, NumPy's, or torch's on any device. (torch need not be imported.)"""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # oneDNN says no more than the last two when an allocation inside of it fails.
    signs = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED",
             "could not create a primitive", "could not execute a primitive")  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def one_line(error: BaseException | str) -> str:
    """A message as one line without control characters."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
