"""Exceptions and warnings. A message says what was expected, what was received and what to do about it."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any


class ScaleLongError(ValueError):
    """Base class of every error the user can fix. Commands print the message alone and exit with code 1.

    Examples:
        >>> try:
        ...     scalelong.ConstantScaling(-1)
        ... except scalelong.ScaleLongError as error:
        ...     print(error)
        kappa must be a finite number > 0, got -1
    """


class InvalidValueError(ScaleLongError):
    """An argument, a setting or a field has a value that cannot be used."""


class UnknownNameError(InvalidValueError):
    """A name is not among the known ones; the message suggests the nearest."""


class UnsupportedNetworkError(ScaleLongError):
    """A network's long skips could not be found, or a scaling does not fit them."""


class ScalingStateError(ScaleLongError):
    """A network is already scaled, not scaled, or wrapped in a way that does not allow the operation."""


class DataError(ScaleLongError):
    """A dataset, a file or an image cannot be read or does not hold what is needed."""


class MissingSplitError(DataError):
    """A dataset has no split of this name."""


class SourceUnavailableError(DataError):
    """A source cannot be used on this machine; the next one is tried."""


class RunError(ScaleLongError):
    """A run folder, its config or a checkpoint is missing, damaged, in use or does not match."""


class NonFiniteError(RunError):
    """The loss, the gradient or a weight is not finite. The message names the module and the timesteps."""


class EvaluationError(ScaleLongError):
    """A metric cannot be computed from what it was given."""


class HubError(ScaleLongError):
    """The Hugging Face hub cannot be reached, or refuses access, or lacks a repository."""


class ScalingWarning(UserWarning):
    """A scaling is valid, but unlikely to do what was intended, or the paper's analysis advises against it.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     spec = scalelong.ConstantScaling(1.5)
        >>> caught[0].category.__name__
        'ScalingWarning'
    """


class EvaluationWarning(UserWarning):
    """A metric can be computed but is unreliable, for example a covariance of fewer images than features."""


class MissingExtraError(ImportError):
    """An optional dependency is needed and not installed.

    Examples:
        >>> from scalelong.errors import require
        >>> try:
        ...     require("not_installed", extra="train", purpose="training")
        ... except scalelong.MissingExtraError as error:
        ...     print(error)
        not_installed is required for training but not installed: pip install 'scalelong[train]'
    """


def require(module: str, extra: str, purpose: str = "") -> ModuleType:
    """Import `module`, or raise `MissingExtraError` that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or not module.startswith(error.name.split(".")[0]):
            raise
        why = f" for {purpose}" if purpose else ""
        raise MissingExtraError(
            f"{module.split('.')[0]} is required{why} but not installed: pip install 'scalelong[{extra}]'",
            name=error.name,
        ) from error


def suggestion(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: str, options: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that is not among `options`."""
    options = list(options)
    return UnknownNameError(f"unknown {kind} {name!r}{suggestion(name, options)} (known: {', '.join(options)})")


def invalid(name: str, expected: str, got: Any, hint: str = "") -> InvalidValueError:
    """Build the error for an unusable value: `invalid("reduction", "an integer >= 1", 0)`."""
    return InvalidValueError(f"{name} must be {expected}, got {got!r}{f'; {hint}' if hint else ''}")


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that an allocation failed: Python's, NumPy's, or torch's on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # The last two are all that oneDNN reports when one of its allocations fails.
    signs = ("not enough memory", "can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED",
             "could not create a primitive", "could not execute a primitive")  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def printable(name: str) -> str:
    """Return a name that is safe to print: one line, no control characters, no unpaired surrogates."""
    return name if name.isprintable() else ascii(name)


def one_line(error: BaseException | str) -> str:
    """Return a message as one line without control characters."""
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
