"""The `scalelong` command: thin, one file a command, and no torch import until a command runs."""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Any


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0 only on success."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        from scalelong.cli.app import app
    except ImportError as error:
        if debug or (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"error: the scalelong command needs {error.name}: pip install 'scalelong[train]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None

    for stream in (sys.stdout, sys.stderr):  # a terminal without κ, a file name that is no text: shown as escapes
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if not debug:
        warnings.showwarning = _show_warning
    try:
        app(arguments, prog_name="scalelong")
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `scalelong … | head` is no error
        raise SystemExit(0) from None
    except Exception as error:
        if debug:
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _show_warning(message: Warning | str, *where: Any, **options: Any) -> None:
    """One line for people: what is warned of, not where in the code."""
    print(f"warning: {message}", file=sys.stderr)


def _sentence(error: Exception) -> str:
    """One line for people. What nobody foresaw says so, and where to look."""
    from scalelong.errors import MissingExtraError, ScaleLongError, one_line, out_of_memory

    said = one_line(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, (ScaleLongError, MissingExtraError, OSError)):
        return said or type(error).__name__
    if out_of_memory(error):
        return f"out of memory: {said or 'the system gave no more'}; a smaller batch needs less"
    return f"unexpected {type(error).__name__}: {said}; --debug shows where (a fault of scalelong, please report it)"
