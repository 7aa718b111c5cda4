"""The `scalelong` command. Every command imports what it needs when it runs, so `--help` stays fast."""

import io
import os
import sys
import warnings
from typing import Any


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: code 0 only on success, one line on standard error for a failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        from scalelong.cli.app import app
    except ImportError as error:
        if debug or (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"error: the scalelong command needs {error.name}: pip install 'scalelong[train]'", file=sys.stderr)
        raise SystemExit(1) from None

    for stream in (sys.stdout, sys.stderr):  # print κ and undecodable file names as escapes where they cannot be shown
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `scalelong … | head` is not an error
        raise SystemExit(0) from None
    except Exception as error:
        if debug:
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _show_warning(message: Warning | str, *where: Any, **options: Any) -> None:
    """Print the warning's text without its source location."""
    print(f"warning: {message}", file=sys.stderr)


def _message(error: Exception) -> str:
    """Return an error as one line. An unexpected error says so and points to --debug."""
    from scalelong.errors import MissingExtraError, ScaleLongError, one_line, out_of_memory

    text = one_line(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, (ScaleLongError, MissingExtraError, OSError)):
        return text or type(error).__name__
    if out_of_memory(error):
        return f"out of memory: {text or 'allocation failed'}; use a smaller batch"
    return (
        f"unexpected {type(error).__name__}: {text}; run again with --debug for the traceback "
        "(this is a bug in scalelong, please report it)"
    )
