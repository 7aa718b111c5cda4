"""The `scalelong` command. Every command imports what it needs when it runs, so `--help` stays fast."""

import io
import os
import re
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

    if argv is None:
        from scalelong.cli import _shared

        _shared.STANDALONE = True
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
        print(f"error: {_message(error, app, arguments)}", file=sys.stderr)
        raise SystemExit(1) from None


def _show_warning(message: Warning | str, *where: Any, **options: Any) -> None:
    """Print the warning's text without its source location."""
    print(f"warning: {message}", file=sys.stderr)


def _message(error: Exception, app: Any, arguments: list[str]) -> str:
    """Return an error as one line. An unexpected error says so and points to --debug."""
    from scalelong.errors import MissingExtraError, ScaleLongError, one_line, out_of_memory

    text = one_line(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, ScaleLongError):
        return _as_options(text, app, arguments)
    if isinstance(error, (MissingExtraError, OSError)):
        return text or type(error).__name__
    if out_of_memory(error):
        return f"out of memory: {text or 'allocation failed'}; use a smaller batch"
    return (
        f"unexpected {type(error).__name__}: {text}; run again with --debug for the traceback "
        "(this is a bug in scalelong, please report it)"
    )


def _as_options(text: str, app: Any, arguments: list[str]) -> str:
    """Spell the settings in a message as options of the command that was run, where it has them."""
    from typer.main import get_command

    command: Any = get_command(app)
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    options = {parameter.name: parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("-")}

    def advice(match: re.Match[str]) -> str:
        name, option, value = match.groups("")
        if name in options:
            return f"pass {options[name]}{value}"
        if "settings" in options:
            return f"pass --set data.{name}={value.strip() or 'true'}"
        return f"run scalelong data prepare with {option}{value} first"

    text = re.sub(r"\bset (\w+) \((--[a-z-]+)( [^()]+)?\)", advice, text)
    if "settings" in options:
        text = re.sub(r"\bset (\w+\.\w+=)", r"pass --set \1", text)
    for name, option in options.items():
        if any(word.partition("=")[0] == option for word in arguments):
            text = re.sub(rf"(?<![\w.-])(\w+\.)?{name} must be", f"{option} must be", text)
    return text
