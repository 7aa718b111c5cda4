"""Contestants in processes of their own: what one sets for its process (malloc, caches) is no help to the others."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from scalelong.errors import ScaleLongError

_SERVE = "from scalelong.bench.remote import serve; serve()"


class Remote:
    """A process that builds cases by `module:function(**arguments)` and times them when asked."""

    def __init__(self, builder: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        self.builder = builder
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE, builder, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.cases: list[str] = json.loads(self._line())

    def seconds(self, case: str) -> float:
        """Processor seconds of one run."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self._line())

    def case(self, name: str) -> RemoteCase:
        return RemoteCase(self, name)

    def close(self) -> int:
        """End the process; its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ScaleLongError(f"the benchmark's process for {self.builder} ended with {self.close()}")
        return line


class RemoteCase:
    """One case of a remote; called, it returns the seconds that it took over there."""

    def __init__(self, remote: Remote, name: str) -> None:
        self.remote, self.name = remote, name

    def __call__(self) -> float:
        return self.remote.seconds(self.name)


@contextmanager
def remotes(**builders: tuple[str, dict[str, Any]]) -> Iterator[dict[str, Remote]]:
    """Processes by name, closed at the end: `remotes(ours=("module:function", {"name": "digits"}))`."""
    with ExitStack() as stack:
        started = {}
        for name, (builder, arguments) in builders.items():
            started[name] = Remote(builder, **arguments)
            stack.callback(started[name].close)
        yield started


def serve() -> None:
    """The other side: a case's name on each line in, its processor seconds on each line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    module, _, function = sys.argv[1].partition(":")
    cases: dict[str, Callable[[], Any]] = getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
    _answer(answers, json.dumps(list(cases)))
    for line in sys.stdin:
        run = cases[line.strip()]
        start = time.process_time()
        run()
        _answer(answers, repr(time.process_time() - start))


def _answer(answers: Any, text: str) -> None:
    answers.write(text + "\n")
    answers.flush()
